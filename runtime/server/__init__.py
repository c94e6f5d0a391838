"""The HTTP room: OpenAI's protocol in front of the executor. The only place where HTTP is spoken."""
