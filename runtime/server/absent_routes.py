"""Routes of OpenAI and vLLM that this server does not have: what a client that asks for one is told."""

_ADAPTERS = "an engine holds no adapters beside its weights: `ingot convert --lora` merges one"

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
    "load_lora_adapter": _ADAPTERS,
    "unload_lora_adapter": _ADAPTERS,
    "pooling": "the engine generates text; it gives no embeddings",
    "rerank": "the engine generates text; it ranks no documents",
    "score": "the engine generates text; it scores no documents",
}
"""First part of a path, below /v1 or without it → why it is not there."""
