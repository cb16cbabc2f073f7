"""Convert a GGUF file, the format of llama.cpp, into a plain model folder."""
