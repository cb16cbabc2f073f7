"""Compare a GGUF file in llama.cpp with the folder it was made of."""
