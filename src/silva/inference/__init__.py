"""Inference: token ids in, sampled ids with log-probs and weight versions out.

`engine.py` is the line that the rest of Silva sees. Behind it: a torch engine in its own thread, a scripted engine for
tests and trials, and servers that speak SGLang's native API. `sglang_scorer.py` scores tokens instead of sampling
them.

Invariant: each sampled id carries the log-prob under softmax(logits / T) and the version of the weights that sampled
it; an engine never returns an id without both.

Open first: `engine.py`, then `torch_engine.py` (asyncio side) and `torch_core.py` (one step).
"""

from silva.inference.engine import Engine, EngineUsage, ImageSupport
from silva.inference.options import EngineOptions
from silva.inference.scripted import ScriptedEngine, ScriptLine, read_script
from silva.inference.time_limit import RETRY_DELAYS_S, answer_in_time

__all__ = [
    "RETRY_DELAYS_S", "Engine", "EngineOptions", "EngineUsage", "ImageSupport", "ScriptLine", "ScriptedEngine",
    "answer_in_time", "read_script",
]  # fmt: skip
