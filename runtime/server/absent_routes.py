"""OpenAI's routes that this server does not have: what a client that asks for one is told."""

ABSENT = {
    "embeddings": "the engine generates text; it gives no embeddings",
    "responses": "the server stores nothing",
    "audio": "the engine reads and writes text only",
    "images": "the engine reads and writes text only",
    "videos": "the engine reads and writes text only",
    "realtime": "the engine reads and writes text only",
    "moderations": "the engine generates text; it judges none",
    "files": "the server stores nothing",
    "uploads": "the server stores nothing",
    "batches": "send the requests themselves: they share every step",
    "vector_stores": "the server stores nothing",
    "conversations": "the server stores nothing",
    "containers": "the server stores nothing",
    "fine_tuning": "engines are built, not trained",
    "evals": "engines are measured with ingot bench",
    "assistants": "assistants do not exist here",
    "threads": "the server stores nothing",
}
"""First part of a path below /v1 → why it is not there."""
