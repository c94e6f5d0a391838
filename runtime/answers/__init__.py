"""What an answer holds beside text, by the wire format of its model: reasoning, and calls of tools."""
