"""Chat templates, system prompts, set beginnings and stop strings: what a model reads, and what a reward does."""

from __future__ import annotations

import pytest
import torch

from mareinforce import MAGRPOConfig
from mareinforce.agents.rendering import Rendering, renderings
from mareinforce.agents.team import Team
from mareinforce.agents.tokenization import Tokenization
from mareinforce.errors import ConfigError, OverlongPrompt, PromptError
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.models import BOS, EOS, TEMPLATE, gpt2_model, table_model, table_tokenizer, word_tokenizer

WORDS = ("a", "b", "c", "user", "assistant", "system", "named", "think")
THINKING = TEMPLATE + "{% if add_generation_prompt and enable_thinking is not defined %} think{% endif %}"
USER = [{"role": "user", "content": "a"}]


def read(prompt, *, template: str | None = TEMPLATE, adds_bos: bool = False, **rules) -> str:
    """What a model reads of a prompt, with its special tokens."""
    tokenizer = word_tokenizer(WORDS, template=template, adds_bos=adds_bos)
    one = Tokenization(tokenizer, gpt2_model(len(tokenizer)), 0, 8, Rendering(**rules))
    return tokenizer.decode(one.encode(prompt))


class TestTemplates:
    def test_auto_renders_conversations_and_leaves_text_alone(self):
        assert read("a") == "a"
        assert read(USER) == "<bos> user a assistant"

    def test_a_system_prompt_makes_a_conversation_of_text(self):
        assert read("a", system_prompt="b") == "<bos> system b user a assistant"
        assert read(USER, system_prompt="b") == "<bos> system b user a assistant"

    def test_the_rows_own_system_message_stays(self):
        own = [{"role": "system", "content": "c"}, *USER]
        assert read(own, system_prompt="b") == "<bos> system c user a assistant"

    def test_always_and_never(self):
        assert read("a", chat_template=True) == "<bos> user a assistant"
        assert read(USER, chat_template=False) == "a"
        assert read([*USER, {"role": "assistant", "content": "b"}], chat_template=False, system_prompt="c") == "c a b"
        assert read("a", template=None, chat_template=False, system_prompt="c") == "c a"

    def test_a_tokenizer_without_a_template_is_refused_with_the_way_out(self):
        for rules, prompt in (({"system_prompt": "b"}, "a"), ({"chat_template": True}, "a"), ({}, USER)):
            with pytest.raises(PromptError, match=r"agent 0: its prompt is a conversation, but .*chat_template: false"):
                read(prompt, template=None, **rules)

    def test_what_the_template_is_given_besides(self):
        assert read(USER, template=THINKING).endswith("assistant think")
        assert read(USER, template=THINKING, template_kwargs={"enable_thinking": False}).endswith("user a assistant")

    @pytest.mark.parametrize("adds_bos", [False, True])
    def test_there_is_one_start_token_whoever_writes_it(self, adds_bos):
        for rules in ({"system_prompt": "b"}, {"chat_template": True}, {"prefill": " c"}):
            text = read(USER, adds_bos=adds_bos, **rules)
            assert text.count("<bos>") == 1
            assert text.startswith("<bos>")
        tokenizer = word_tokenizer(WORDS, template=TEMPLATE, adds_bos=True)  # what tokenizing the rendered text gives
        assert tokenizer(tokenizer.apply_chat_template(USER, tokenize=False)).input_ids[:2] == [BOS, BOS]

    def test_a_set_beginning_follows_the_prompt(self):
        assert read("a", prefill=" b") == "a b"
        assert read(USER, prefill=" b") == "<bos> user a assistant b"


def test_settings_are_one_for_all_or_one_an_agent():
    config = MAGRPOConfig(
        system_prompt=["x", None], assistant_prefill="so", stop="END", chat_template_kwargs={"enable_thinking": False}
    )
    first, second = renderings(config)
    assert (first.system_prompt, second.system_prompt) == ("x", None)
    assert (second.prefill, second.stop, second.template_kwargs) == ("so", ("END",), {"enable_thinking": False})
    assert renderings(MAGRPOConfig()) == [Rendering(), Rendering()]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system_prompt": ["x"]}, "system_prompt lists 1 texts for num_agents=2"),
        ({"assistant_prefill": ["x", "y", "z"]}, "assistant_prefill lists 3 texts"),
        ({"stop": []}, r"stop=\[\]: must be texts that are not empty"),
        ({"stop": ["a", ""]}, "must be texts that are not empty"),
        ({"chat_template": "yes"}, "chat_template='yes': must be true or false or auto"),
        ({"chat_template_kwargs": "no"}, "chat_template_kwargs='no': must be key: value pairs or null"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs.tokenize: is set for every prompt",
        ),
        ({"history": "mine"}, "history='mine': must be none | own | all"),
    ],
)
def test_settings_that_cannot_be_meant(fields, message):
    with pytest.raises(ConfigError, match=message):
        MAGRPOConfig(**fields)


class TestAnswers:
    def test_the_reward_reads_the_set_beginning_and_no_stop_string(self):
        tokenizer = word_tokenizer(WORDS)
        rules = Rendering(prefill="a ", stop=("b c",))
        one = Tokenization(tokenizer, gpt2_model(len(tokenizer)), 0, 8, rules)
        ids = torch.tensor(tokenizer("c b c").input_ids)
        assert one.answer(ids) == "a c "
        assert Tokenization(tokenizer, gpt2_model(len(tokenizer)), 0, 8).answer(ids) == "c b c"

    def test_sampling_ends_at_a_stop_string_of_several_tokens(self):
        texts = ["<eos>", "x", "y", "z"]
        table = torch.full((4, 4), -30.0)
        for token, follower in ((1, 2), (2, 3), (3, 1), (0, 1)):
            table[token, follower] = 30.0  # x y z x y z ... and never an end
        tokenizer = table_tokenizer(texts)
        requests = [Request(0, torch.tensor([first]), (StreamKey("train", 0, 0, 0, (), 0, first),)) for first in (3, 1)]

        def sample(**rules):
            team = Team([table_model(table, 0)], [tokenizer], 9, renderings=[Rendering(**rules)])
            return [one for (one,) in TransformersEngine(team).sample(requests, Sampling(9))]

        first, second = sample(stop=("y z",))
        assert (first.ids.tolist(), first.ended, first.text) == ([1, 2, 3], True, "x ")
        assert (second.ids.tolist(), second.ended, second.text) == ([2, 3], True, "")
        assert len(first.logprobs) == 3  # the stop string is scored: the policy chose to say it
        assert [(len(one.ids), one.ended) for one in sample()] == [(9, False), (9, False)]
        assert [len(one.ids) for one in sample(stop=("never",))] == [9, 9]

    def test_a_stop_string_that_came_before_the_least_length_ends_it_there(self):
        words = word_tokenizer()
        first, end = words.convert_tokens_to_ids(["a", "z"])
        table = torch.full((len(words), len(words)), -30.0)
        for token in range(first, end):
            table[token, token + 1] = 30.0  # b c d e ...
        team = Team([table_model(table, EOS)], [words], 20, renderings=[Rendering(stop=("c",))])
        request = Request(0, torch.tensor([first]), (StreamKey("train", 0, 0, 0, (), 0, 0),))
        ((found,),) = TransformersEngine(team).sample([request], Sampling(20, 8))
        assert (len(found.ids), found.ended, found.text.strip()) == (8, True, "b")

    def test_no_stop_before_the_least_length(self):
        table = torch.full((3, 3), -30.0)
        table[:, 1] = 30.0
        team = Team(
            [table_model(table, 0)], [table_tokenizer(["<eos>", "x", "y"])], 9, renderings=[Rendering(stop=("x",))]
        )
        request = Request(0, torch.tensor([1]), (StreamKey("train", 0, 0, 0, (), 0, 0),))
        for least, length in ((0, 1), (4, 4)):
            ((one,),) = TransformersEngine(team).sample([request], Sampling(9, min_new_tokens=least))
            assert (len(one.ids), one.ended) == (length, True)


def test_a_prompt_that_is_too_long_says_how_much_room_there_is():
    tokenizer = word_tokenizer(WORDS)
    one = Tokenization(tokenizer, gpt2_model(len(tokenizer), positions=32), 0, 8)
    assert len(one.encode(" ".join("a" * 24))) == 24
    for length in (30, 40):
        with pytest.raises(OverlongPrompt, match=f"has {length} tokens.*max_new_tokens=8.*context of 32") as error:
            one.encode(" ".join("a" * length))
        assert (len(error.value.ids), error.value.limit) == (length, 24)
