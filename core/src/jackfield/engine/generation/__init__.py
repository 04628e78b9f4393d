"""Text generation: blocks of the key-value cache, sampling, and the sequences that grow."""
