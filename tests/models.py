"""Small models and tokenizers that tests build in milliseconds, without any file.

Imported by tests as ``tests.models``. Every model is in evaluation mode, in float32, and seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] }}"
    "{% if 'name' in m %} named {{ m['name'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)


class TableConfig(PreTrainedConfig):
    model_type = "mareinforce_table"

    def __init__(self, vocab_size: int = 4, **kwargs: Any) -> None:
        self.vocab_size = vocab_size
        self.num_hidden_layers = 1  # generate asks; nothing is ever kept in its cache
        super().__init__(**kwargs)


class TableModel(PreTrainedModel, GenerationMixin):
    """Next-token logits are the row of ``table`` [V, V] that the last token names: everything is known exactly."""

    config_class = TableConfig

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.table(input_ids))


AutoConfig.register("mareinforce_table", TableConfig)
AutoModelForCausalLM.register(TableConfig, TableModel)


def table_model(table: Tensor | int, eos_token_id: int | list[int] | None = None) -> TableModel:
    """A table model of given logits [V, V], or the uniform one of V tokens."""
    weight = torch.zeros(table, table) if isinstance(table, int) else table
    model = TableModel(TableConfig(vocab_size=len(weight), eos_token_id=eos_token_id))
    with torch.no_grad():
        model.table.weight.copy_(weight)
    return model.eval()


def table_tokenizer(texts: Sequence[str], eos: str = "<eos>", pad: str | None = None) -> PreTrainedTokenizerFast:
    """A word tokenizer of exactly these texts, one id each in their order; ``eos`` is one of them."""
    core = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token=texts[-1]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, **({"pad_token": pad} if pad else {}))


def word_tokenizer(
    words: Sequence[str] = WORDS, *, pad: str | None = "<pad>", adds_bos: bool = False, template: str | None = None
) -> PreTrainedTokenizerFast:
    """One id a word after ``<pad> <bos> <eos> <unk>``. ``pad``: which text is the pad token, if any."""
    texts = (*SPECIALS, *words)
    core = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        **({"pad_token": pad} if pad else {}),
    )
    if template:
        tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over 256 bytes with the single merge "a" + "b"; ``<eos>`` is the last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "ab", "<eos>"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def gpt2_model(
    vocabulary: int, *, dropout: float = 0.0, positions: int = 64, seed: int = 0, eos: int | list[int] = EOS
) -> GPT2LMHeadModel:
    """GPT-2 of 2 layers and width 32: absolute positions. Its weights are large enough that positions matter."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=BOS,
        eos_token_id=eos,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    return GPT2LMHeadModel(config).eval()


def llama_model(
    vocabulary: int, *, positions: int = 64, seed: int = 0, eos: int | list[int] = EOS, tied: bool = False
) -> LlamaForCausalLM:
    """Llama of 2 layers and width 32: rotary positions."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=BOS,
        eos_token_id=eos,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def qwen2_model(
    vocabulary: int, *, window: int | None = None, seed: int = 0, eos: int | list[int] = EOS
) -> Qwen2ForCausalLM:
    """Qwen2 of 2 layers and width 32: grouped heads, biases, tied weights. ``window``: how far back layers look."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        max_position_embeddings=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=BOS,
        eos_token_id=eos,
        tie_word_embeddings=True,
        initializer_range=0.3,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()
