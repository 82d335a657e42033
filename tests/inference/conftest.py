from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_support import build_model, decode_bytes, save_model

from silva.inference.torch_engine import TorchEngine

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model with tied embeddings, and its directory."""
    model = build_model("qwen3-tied")
    return model, save_model(model, tmp_path_factory.mktemp("qwen3"))


EngineFactory = Callable[..., Awaitable[TorchEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[EngineFactory]:
    engines: list[TorchEngine] = []

    async def start(folder: Path, **options: Any) -> TorchEngine:
        engine = TorchEngine(folder, **{"decode_text": decode_bytes, "device": "cpu", "dtype": "float32", **options})
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.close()
