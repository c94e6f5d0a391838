"""GGUF files, as llama.cpp writes them: read as if they were a Hugging Face directory."""
