"""The reward contract: what the user's function is given, which results are taken, and what is said of the others."""

import functools
import json
import math
import pickle
import random

import numpy as np
import pytest
import torch

from mareinforce.errors import ConfigError, RewardError, UserCodeError
from mareinforce.rewards import Chain, Reward, RewardProcessors, Scale, Shift
from tests.names import shown

NODE = {
    "row": {"prompt": "tell a story", "answer": 7},
    "prompt": "tell a story",
    "turn": 1,
    "num_turns": 2,
    "prompt_history_per_agent": [["p", "p2"], ["q", "q2"]],
    "response_history_per_agent": [["r"], ["s"]],
    "ended": [[True, False, True, True], [True, True, True, False]],
}
TEXTS = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]


def score(func, texts=TEXTS, processor=None, num_agents=2, **changes):
    return Reward(func, num_agents, processor).score(texts, **{**NODE, **changes})


def returning(result):
    def my_reward(first, second):
        return result

    return my_reward


# What the function is given


def test_it_gets_one_aligned_list_an_agent_in_one_call():
    calls = []

    def reward(*lists):
        calls.append(lists)
        return [0, 1, 2, 3]

    assert score(reward).raw == [0.0, 1.0, 2.0, 3.0]
    assert calls == [tuple(TEXTS)]


def test_every_declared_keyword_is_filled_and_kwargs_receives_all():
    seen = {}

    def reward(
        a, b, prompts, batch_items, turn, num_turns, prompt_history_per_agent, response_history_per_agent, ended
    ):
        seen["declared"] = {name: value for name, value in locals().items() if name not in ("a", "b", "seen")}
        return [0] * 4

    def reward_any(a, b, **kwargs):
        seen["any"] = kwargs
        return [0] * 4

    score(reward), score(reward_any)
    assert seen["declared"] == seen["any"]
    assert seen["any"] == {
        "prompts": ["tell a story"] * 4,
        "batch_items": [NODE["row"]] * 4,
        **{name: value for name, value in NODE.items() if name not in ("row", "prompt")},
    }


def test_prompts_may_come_first():
    def reward(prompts, a, b, turn):
        return [
            float(p == "tell a story" and x + y in ("ae", "bf")) + turn for p, x, y in zip(prompts, a, b, strict=True)
        ]

    assert score(reward).raw == [2.0, 2.0, 1.0, 1.0]
    assert Reward(lambda prompts, only: [1], 1).score([["x"]], **NODE).raw == [1.0]


def test_defaults_the_contract_does_not_know_are_left_alone():
    assert score(lambda a, b, goal=3: [goal] * 4).raw == [3.0] * 4
    assert score(functools.partial(lambda a, b, goal: [goal] * 4, goal=2)).raw == [2.0] * 4


@pytest.mark.parametrize(
    ("func", "num_agents", "says"),
    [
        (
            lambda a, b: [],
            3,
            r"<lambda>\(a, b\).*3 positional.*agent 0, completions of agent 1, completions of agent 2",
        ),
        (lambda a, b, c: [], 2, r"requires 'c'"),
        (lambda prompts, a: [], 2, r"prompts, completions of agent 0"),
        (lambda a, b, *, batch_item: [], 2, r"requires 'batch_item'.*Did you mean 'batch_items'"),
        (lambda a, turn: [], 2, r"'turn' would receive"),
        ("story.reward", 2, r" is 'story.reward', which cannot be called"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused_when_it_is_handed_over(func, num_agents, says):
    with pytest.raises(ConfigError, match=f"reward_func.*{says}"):
        Reward(func, num_agents)


def test_a_processor_must_take_one_reward():
    with pytest.raises(ConfigError, match=r"reward_processor .*\(reward, factor\).*requires 'factor'"):
        Reward(returning([1]), 2, lambda reward, factor: reward)


def test_changing_the_arguments_changes_nothing_outside():
    texts, row = [list(column) for column in TEXTS], {"prompt": "p", "info": {"tags": ["x"]}}

    def vandal(a, b, batch_items, prompt_history_per_agent, ended):
        a.clear(), ended[0].clear(), prompt_history_per_agent[0].append("mine")
        batch_items[0]["info"]["tags"].append("mine")
        batch_items[0]["extra"] = 1
        assert "extra" not in batch_items[1]
        return [0] * 4

    histories = [["p"], ["q"]]
    score(vandal, texts, row=row, prompt_history_per_agent=histories)
    assert texts == TEXTS
    assert row == {"prompt": "p", "info": {"tags": ["x"]}}
    assert histories == [["p"], ["q"]]
    assert NODE["ended"][0] == [True, False, True, True]


def test_rows_stay_paired_with_their_prompts_and_keep_their_types():
    rows = [{"prompt": f"question {n}", "answer": n, "meta": {"level": [n], "none": None}} for n in range(5)]
    random.Random(0).shuffle(rows)

    def reward(a, b, prompts, batch_items):
        for prompt, item in zip(prompts, batch_items, strict=True):
            assert set(item) == {"prompt", "answer", "meta"}
            assert type(item["answer"]) is int
            assert item["meta"] == {"level": [item["answer"]], "none": None}
            assert prompt == item["prompt"]
        return [prompts[0] == f"question {item['answer']}" for item in batch_items]

    paired = Reward(reward, 2)
    for row in rows:
        node = {**NODE, "row": row, "prompt": row["prompt"]}
        assert paired.score([["x"] * 3, ["y"] * 3], **node).raw == [1.0] * 3
    with pytest.raises(UserCodeError, match="AssertionError"):  # the check does notice a wrong pairing
        paired.score([["x"] * 3, ["y"] * 3], **{**NODE, "row": rows[0], "prompt": rows[1]["prompt"]})


def test_unequal_lists_are_never_scored():
    with pytest.raises(ValueError, match=r"lengths \[4, 3\]"):
        score(returning([0] * 4), [TEXTS[0], TEXTS[1][:3]])


# What it may return


@pytest.mark.parametrize(
    "values",
    [
        [1, 0, 0, 1],
        (1, 0, 0, 1),
        [True, False, False, True],
        [np.float32(1), np.int64(0), np.bool_(False), np.float16(1)],
        [torch.tensor(1), torch.tensor(0.0), torch.tensor(False), torch.tensor(1.0, requires_grad=True)],
        [np.array(1.0), np.array(0), 0, 1],
        np.array([1, 0, 0, 1]),
        np.array([True, False, False, True]),
        torch.tensor([1, 0, 0, 1]),
        torch.tensor([1, 0, 0, 1], dtype=torch.bfloat16),
        torch.tensor([1.0, 0, 0, 1], requires_grad=True),
        torch.tensor([1.0, 0, 0, 1], requires_grad=True) * 1,
    ],
    ids=shown,
)
def test_every_kind_of_number_becomes_a_plain_float(values):
    for scores in (score(returning(values)), score(returning({"reward": values, "part": values}))):
        assert scores.raw == scores.processed == [1.0, 0.0, 0.0, 1.0]
        assert {type(x) for x in [*scores.raw, *scores.processed]} == {float}
    assert json.dumps(scores.components) == '{"part": [1.0, 0.0, 0.0, 1.0]}'


@pytest.mark.parametrize("count", [1, 3, 5, 0])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_wrong_number_of_rewards_is_never_broadcast_or_cut(count, kind):
    with pytest.raises(RewardError, match=rf"my_reward returned.*expected 4 .*got {count} ") as error:
        score(returning(kind([1.0] * count)))
    assert "turn 2 of 2" in str(error.value)
    assert score(returning(kind([1.0] * 4))).raw == [1.0] * 4


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([1, None, 0, math.nan], ["joint actions 1 (None), 3 (nan)"]),
        ([1, 0, math.inf, 0], ["joint action 2 (inf)"]),
        ([-math.inf, 0, 0, 0], ["joint action 0 (-inf)"]),
        ([1, "0.5", 0, 0], ["joint action 1 ('0.5')"]),
        ([[1], [0], [0], [1]], ["joint actions 0 ([1]), 1 ([0]), 2 ([0]), 3 ([1])"]),
        ([1, 1j, 0, 10**400], ["joint actions 1 (1j), 3 (1000"]),
        (
            [np.float32("nan"), torch.tensor(math.inf), torch.tensor([1.0]), np.array([1.0])],
            ["0 (", "1 (", "2 (", "3 ("],
        ),
        ([np.str_("1"), np.timedelta64(5, "ns"), np.complex64(1), object()], ["0 (", "1 (", "2 (", "3 ("]),
        (np.array([1.0, np.nan, 0, 0]), ["joint action 1 ("]),
        (torch.tensor([1.0, 0, math.inf, 0]), ["joint action 2 (inf)"]),
        (torch.ones(4, 1), ["0 ([1.0])", "3 ([1.0])"]),
    ],
    ids=shown,
)
def test_what_is_not_a_finite_number_is_named_with_its_joint_action(values, named):
    with pytest.raises(RewardError, match=r"reward_func .*my_reward") as error:
        score(returning(values))
    for part in [*named, "turn 2 of 2", "tell a story"]:
        assert part in str(error.value)
    clean = [1.0, 0.0, 0.0, 1.0]
    assert score(returning(clean)).raw == clean


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (0.5, "a single float"),
        (torch.tensor(1.0), "a single Tensor"),
        (np.float32(1.0), "a single float32"),
        (None, "None.*return.* missing"),
        ("1001", "a single str"),
        ((x for x in [1, 0, 0, 1]), "a generator"),
        ({1, 0}, "a single set"),
        ({"rewards": [1, 0, 0, 1]}, "without 'reward', with .*'rewards'.* under the key 'reward'"),
        ({"reward": [1, 0, 0, 1], 3: [1, 0, 0, 1]}, "the key 3"),
        ({"reward": [1, 0, 0, 1], "part": [1, 0]}, "component 'part', returned .*expected 4 .*got 2"),
        ({"reward": [1, 0, 0, 1], "part": 1.0}, "component 'part', returned .*a single float"),
        ({"reward": [1, 0, 0, 1], "part": [1, 0, None, 1]}, r"component 'part', gave .*joint action 2 \(None\)"),
        ({"reward": 1.0}, "a single float"),
    ],
    ids=shown,
)
def test_what_is_not_a_column_of_rewards_is_told_in_words(result, says):
    with pytest.raises(RewardError, match=f"my_reward.*{says}"):
        score(returning(result))


def test_components_are_kept_apart_from_the_reward():
    scores = score(returning({"part": [1, 2, 3, 4], "reward": [0, 1, 0, 1]}), processor=Scale(10))
    assert (scores.raw, scores.processed) == ([0, 1, 0, 1], [0, 10, 0, 10])
    assert scores.components == {"part": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("error", [ValueError("bad json"), TypeError("my_reward() missing 1 required argument")])
def test_an_error_in_the_reward_is_passed_on_after_a_single_call(error):
    calls = []

    def my_reward(a, b):
        calls.append(a)
        if len(calls) == 3:
            raise error
        return [0] * 4

    reward = Reward(my_reward, 2)
    reward.score(TEXTS, **NODE), reward.score(TEXTS, **NODE)
    with pytest.raises(UserCodeError) as raised:
        reward.score(TEXTS, **NODE)
    assert raised.value.__cause__ is error
    for part in ["my_reward", str(error), "turn 2 of 2", "tell a story"]:
        assert part in str(raised.value)
    assert len(calls) == 3


def test_an_async_reward_is_awaited():
    async def reward(a, b, turn):
        return [turn] * 4

    assert score(reward).raw == [1.0] * 4


# The processor


def test_the_processor_sees_every_reward_once_as_a_float():
    seen = []

    def double(reward):
        seen.append(reward)
        return np.float64(2 * reward)

    scores = score(returning(torch.tensor([1, 0, 0, 3])), processor=double)
    assert seen == [1.0, 0.0, 0.0, 3.0]
    assert {type(x) for x in [*seen, *scores.processed]} == {float}
    assert (scores.raw, scores.processed) == ([1, 0, 0, 3], [2, 0, 0, 6])


def test_a_processor_without_a_number_is_named_as_the_processor():
    with pytest.raises(RewardError, match=r"reward_processor .*joint actions 1 \(None\), 2 \(None\)"):
        score(returning([1, 0, 0, 1]), processor=lambda r: r or None)
    with pytest.raises(RewardError, match=r"reward_processor .*joint action 3 \(inf\)"):
        score(returning([1, 0, 0, 1e300]), processor=Scale(1e300))
    with pytest.raises(
        UserCodeError, match=r"reward_processor .*ZeroDivisionError.*reward 0.0 of joint action 1"
    ) as error:
        score(returning([1, 0, 0, 1]), processor=lambda r: 1 / r)
    assert type(error.value.__cause__) is ZeroDivisionError


def test_ready_made_processors():
    assert RewardProcessors.scale(factor=100)(0.25) == 25.0
    assert RewardProcessors.shift(value=-1)(0.25) == -0.75
    assert RewardProcessors.scale()(0.3) == RewardProcessors.shift()(0.3) == 0.3
    both = RewardProcessors.chain(Scale(2), Shift(1))
    assert (both(3.0), RewardProcessors.chain(Shift(1), Scale(2))(3.0)) == (7, 8)
    for processor in (Scale(100), Shift(-1.0), Chain([Scale(2.0), Shift(1.0)])):
        again = pickle.loads(pickle.dumps(processor))
        assert again == processor
        assert again(3.0) == processor(3.0)
    assert repr(Scale(2.0)) == "Scale(factor=2.0)"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, True])
def test_a_processor_constant_must_be_a_finite_number(wrong):
    with pytest.raises(ConfigError, match=r"Scale\(factor="):
        Scale(wrong)
    with pytest.raises(ConfigError, match=r"Shift\(value="):
        Shift(wrong)
