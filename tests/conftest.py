"""What every test shares. It is imported before `mareinforce`, so that the shapes of its numerics are checked."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # cores are dealt out: each using all would slow all down
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

from jaxtyping import install_import_hook

# the rooms in which tensors have shapes; elsewhere wrong types are refused in words, which tests look at, and looking
# at every call of every rollout would take most of the tests' time
install_import_hook(["mareinforce.algorithms", "mareinforce.agents.scoring"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
    os.environ.pop("PL_GLOBAL_SEED", None)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)  # left by a test's seed_everything: a module's fixture is made before ours


@pytest.fixture(autouse=True)
def _users_modules_are_forgotten(tmp_path_factory):
    """Modules that a test wrote and imported: the next one writes its own of the same name."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path_factory.getbasetemp()):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def words():
    """A word tokenizer with a pad token of its own."""
    from tests.models import word_tokenizer

    return word_tokenizer()


@pytest.fixture
def word_count(words):
    return len(words)


@pytest.fixture
def gpt2(word_count):
    """GPT-2, absolute positions, no dropout."""
    from tests.models import gpt2_model

    return gpt2_model(word_count)


@pytest.fixture
def llama(word_count):
    """Llama, rotary positions."""
    from tests.models import llama_model

    return llama_model(word_count)
