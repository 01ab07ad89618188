"""What loggers are told has no secrets in it, and everything else."""

from __future__ import annotations

import dataclasses

import pytest

from mareinforce import MAGRPOConfig
from mareinforce.hyperparameters import HIDDEN, without_secrets


@pytest.mark.parametrize(
    "name", ["token", "hf_token", "api_key", "apikey", "OPENAI_API_KEY", "password", "client_secret", "auth_token"]
)
def test_texts_of_keys_that_are_named_like_secrets_are_hidden_however_deep(name):
    assert without_secrets({"model": [{name: "abc", "other": "abc"}]}) == {"model": [{name: HIDDEN, "other": "abc"}]}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("use sk-abcdefghijklmnop now", f"use {HIDDEN} now"),
        ("hf_abcdefghijklmnop", HIDDEN),
        ("https://me:abc@example.org/rows", f"https://{HIDDEN}@example.org/rows"),
        ("https://example.org/a:b", "https://example.org/a:b"),
        ("hf_rows", "hf_rows"),
    ],
)
def test_texts_that_look_like_secrets_are_hidden(text, left):
    assert without_secrets({"path": text}) == {"path": left}


def test_a_configuration_is_told_whole():
    config = dataclasses.asdict(MAGRPOConfig())
    assert without_secrets(config) == {name: list(value) if isinstance(value, tuple) else value
                                       for name, value in config.items()}  # fmt: skip
    given = {"token": None, "tokenizer": "a", "special_tokens": {"pad_token": "<pad>"}, "max_new_tokens": 3}
    assert without_secrets(given) == given
