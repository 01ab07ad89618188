"""What an agent is given for a prompt, and how it reads its own ids."""

import pytest
import torch

from mareinforce.agents.team import Team
from mareinforce.agents.tokenization import Tokenization
from mareinforce.errors import AgentError, PromptError
from tests.models import (
    BOS,
    EOS,
    TEMPLATE,
    byte_tokenizer,
    gpt2_model,
    llama_model,
    table_model,
    table_tokenizer,
    word_tokenizer,
)

MESSAGES = [{"role": "a", "content": "b c"}, {"role": "d", "content": "e"}]
CHAT_WORDS = (*"abcdefgh", "assistant", "named")


def tokenization(tokenizer, model=None, max_new_tokens=8):
    return Tokenization(tokenizer, model or table_model(len(tokenizer), EOS), 0, max_new_tokens)


def texts(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(ids.tolist())


class TestBeginningOfSequence:
    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_template_and_tokenizer_give_it_once(self, adds_bos):
        tokenizer = word_tokenizer(CHAT_WORDS, adds_bos=adds_bos, template=TEMPLATE)
        ids = tokenization(tokenizer).encode(MESSAGES)
        assert texts(tokenizer, ids) == ["<bos>", "a", "b", "c", "d", "e", "assistant"]
        if adds_bos:  # what rendering first and encoding then gives
            rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
            assert tokenizer(rendered)["input_ids"][:2] == [BOS, BOS]

    def test_a_tokenizer_that_writes_it_does_so_for_a_template_that_does_not(self):
        bare = TEMPLATE.replace("{{ bos_token }}", "")
        adding = word_tokenizer(CHAT_WORDS, adds_bos=True, template=bare)
        assert texts(adding, tokenization(adding).encode(MESSAGES))[:2] == ["<bos>", "a"]
        plain = word_tokenizer(CHAT_WORDS, template=bare)
        assert texts(plain, tokenization(plain).encode(MESSAGES))[0] == "a"

    @pytest.mark.parametrize("prompt", ["a b", "<bos> a b"])
    def test_text_that_starts_with_it_has_it_once(self, prompt):
        tokenizer = word_tokenizer(adds_bos=True)
        assert texts(tokenizer, tokenization(tokenizer).encode(prompt)) == ["<bos>", "a", "b"]

    def test_text_is_left_alone_where_the_tokenizer_adds_nothing(self):
        tokenizer = word_tokenizer()
        assert texts(tokenizer, tokenization(tokenizer).encode("<bos> <bos> a")) == ["<bos>", "<bos>", "a"]
        assert texts(tokenizer, tokenization(tokenizer).encode("a <bos>")) == ["a", "<bos>"]


class TestMessages:
    def test_keys_filled_with_none_are_not_rendered(self):
        tokenizer = word_tokenizer(CHAT_WORDS, template=TEMPLATE)
        filled = [{**message, "name": None} for message in MESSAGES]
        agent = tokenization(tokenizer)
        assert torch.equal(agent.encode(filled), agent.encode(MESSAGES))
        assert filled[0]["name"] is None  # the row is the user's
        named = agent.encode([{**MESSAGES[0], "name": "f"}])
        assert texts(tokenizer, named) == ["<bos>", "a", "b", "c", "named", "f", "assistant"]

    def test_a_tokenizer_without_a_template_refuses_them_with_the_reason(self):
        with pytest.raises(PromptError, match="is a conversation, but its tokenizer has no chat template"):
            tokenization(word_tokenizer()).encode(MESSAGES)

    def test_what_the_template_refuses_is_told(self):
        template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(PromptError, match="roles must alternate"):
            tokenization(word_tokenizer(template=template)).encode(MESSAGES)

    @pytest.mark.parametrize("prompt", [[], ["a"], [MESSAGES]])
    def test_other_lists_are_refused(self, prompt):
        tokenizer = word_tokenizer(CHAT_WORDS, template=TEMPLATE)
        with pytest.raises(PromptError, match="must be text or a list of messages"):
            tokenization(tokenizer).encode(prompt)


class TestContext:
    @pytest.mark.parametrize("make", [gpt2_model, llama_model])
    def test_a_prompt_that_fits_exactly_is_untouched_and_a_longer_one_refused(self, make):
        tokenizer = word_tokenizer()
        agent = tokenization(tokenizer, make(len(tokenizer), positions=32), max_new_tokens=8)
        assert agent.encode(" ".join("a" * 24)).tolist() == [4] * 24
        for length in (25, 30, 40):
            with pytest.raises(PromptError, match=f"{length} tokens.*max_new_tokens=8.*context of 32.*to 24 tokens"):
                agent.encode(" ".join("a" * length))

    def test_a_model_without_a_limit_has_none(self):
        assert tokenization(word_tokenizer()).encode(" ".join("a" * 5000)).shape == (5000,)

    def test_an_empty_prompt_starts_from_the_beginning_of_sequence_or_is_refused(self):
        assert tokenization(word_tokenizer()).encode("").tolist() == [BOS]
        tokenizer = table_tokenizer(["<eos>", "a", "b"])
        with pytest.raises(PromptError, match="has no tokens"):
            tokenization(tokenizer).encode("")


class TestEnds:
    def test_all_end_ids_of_tokenizer_model_and_generation_config_count(self):
        tokenizer = word_tokenizer()
        model = gpt2_model(len(tokenizer), eos=[5, 6])
        model.generation_config.eos_token_id = [6, 7, 10_000]
        assert tokenization(tokenizer, model).end_ids == (EOS, 6, 7, 5)  # 10 000 is no token of this model

    def test_an_agent_that_could_never_end_is_refused(self):
        tokenizer = word_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(AgentError, match="agent 0: neither its tokenizer nor its model names an end token"):
            tokenization(tokenizer, table_model(len(tokenizer)))


def test_text_leaves_special_tokens_out():
    agent = tokenization(word_tokenizer())
    assert agent.decode(torch.tensor([4, 5, EOS])) == "a b"
    assert agent.decode(torch.tensor([EOS])) == ""


def test_ids_of_another_tokenizer_are_refused():
    with pytest.raises(PromptError, match="gives the id 29, but its model knows 10 tokens"):
        tokenization(word_tokenizer(), table_model(10, EOS)).encode("a z")


def test_text_that_reencodes_to_other_ids_is_not_needed_again():
    tokenizer = byte_tokenizer()
    agent = tokenization(tokenizer)
    said = torch.tensor([tokenizer.convert_tokens_to_ids(t) for t in "ab"])
    assert agent.decode(said) == "ab"
    assert agent.encode("ab").shape == (1,)  # decoding and encoding again is another sequence


def test_agents_use_their_own_tokenizers_and_leave_them_as_they_were():
    first, second = word_tokenizer(pad=None), word_tokenizer(["z", "y", "x"], pad="<eos>")
    before = [(t.pad_token, t.padding_side, t.chat_template, len(t)) for t in (first, second)]
    team = Team([gpt2_model(len(first)), llama_model(len(second))], [first, second], max_new_tokens=8)
    assert team.encode(0, "z").tolist() == [29]
    assert team.encode(1, "z").tolist() == [4]
    assert (team.decode(0, torch.tensor([4])), team.decode(1, torch.tensor([4]))) == ("a", "z")
    assert [(t.pad_token, t.padding_side, t.chat_template, len(t)) for t in (first, second)] == before
