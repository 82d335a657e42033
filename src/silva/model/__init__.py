"""Model folders and the decoder.

Consumes Hugging Face model directories. Produces their config, weights and fingerprint, an eager decoder with a
key-value cache for the torch engine, and the check that two folders read the same token ids.

Invariant: a folder that cannot be used is refused by a ConfigError that names the file and the key; nothing is loaded
in part.

Open first: `checkpoint.py` (reading folders), `decoder.py` (the forward pass).
"""
