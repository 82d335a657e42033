"""Model folders and the decoder.

Consumes Hugging Face model directories. Produces their config, weights and fingerprint, an eager decoder with a
key-value cache for the torch engine, and the check that two folders read the same token ids.

Invariant: a folder that cannot be used is refused by a ConfigError that names the file and the key; nothing is loaded
in part.

Open first: `checkpoint.py` (reading folders), `decoder.py` (the forward pass).
"""

from silva.model.checkpoint import hf_config_dict, load_weights
from silva.model.config import DecoderConfig
from silva.model.fingerprint import model_fingerprint
from silva.model.options import Dtype, ModelOptions
from silva.model.same_ids import check_same_ids, num_positions, plain_words
from silva.model.torch_env import limit_threads, prepare
from silva.model.unscored import Unscored, tell_unscored

__all__ = [
    "DecoderConfig", "Dtype", "ModelOptions", "Unscored", "check_same_ids", "hf_config_dict", "limit_threads",
    "load_weights", "model_fingerprint", "num_positions", "plain_words", "prepare", "tell_unscored",
]  # fmt: skip
