"""Which metrics a run logs is known before it starts, and names that cannot be meant are refused."""

from __future__ import annotations

import pytest

from mareinforce import MAGRPOConfig
from mareinforce.errors import ConfigError
from mareinforce.metric_names import check_after, check_before, known_metrics
from tests.unit.test_docs import METRICS, first_cells, pattern_of

EVERYTHING = MAGRPOConfig(
    importance_sampling="token",
    reference_kl_enabled=True,
    prompt_overflow="truncate_left",
    num_turns=2,
    on_reward_error="skip",
)
LITTLE = MAGRPOConfig(num_turns=1, eval_interval=0)
OPEN = {"turn_k/<component>_mean", "turn_k/<component>_std", "eval/<name>"}


def before(name, config=LITTLE, *, evaluates=False, aggregates=False, others=False):
    check_before(name, config, what="monitor", evaluates=evaluates, aggregates=aggregates, others=others)


def test_the_names_are_those_of_the_documentation():
    assert {pattern_of(name) for name in known_metrics(EVERYTHING)} == first_cells(METRICS).keys() - OPEN
    assert len(set(known_metrics(EVERYTHING))) == len(known_metrics(EVERYTHING))


def test_what_is_switched_off_is_not_known():
    names = known_metrics(LITTLE)
    assert not [name for name in names if name.startswith(("eval/", "turn_2/")) or "kl" in name or "importance" in name]
    assert "agent_1/loss" in names
    assert "agent_2/loss" not in names


@pytest.mark.parametrize(
    "name",
    ["turn_1/reward_maen", "turn_2/reward_mean", "turn_0/words_mean", "turn_2/words_mean", "agent_2/loss", "step_"],
)
def test_names_that_no_such_run_can_log_are_refused_before_it_starts(name):
    with pytest.raises(ConfigError, match=f"monitor='{name}': there is no such metric.*turn_1/reward_mean, "):
        before(name)


def test_a_near_name_is_suggested():
    with pytest.raises(ConfigError, match="Did you mean 'turn_1/expected_return'"):
        before("turn_1/expected_retrun")


@pytest.mark.parametrize("name", ["turn_1/reward_mean", "agent_1/grad_norm", "updates", "turn_1/words_mean"])
def test_names_that_it_logs_or_may_log_are_not(name):
    before(name)


def test_evaluation_must_take_place():
    with pytest.raises(ConfigError, match="nothing is evaluated while this run trains; set eval_interval"):
        before("eval/turn_1/reward_mean")
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        before("eval/turn_1/reward_mean", EVERYTHING)  # no rows
    before("eval/turn_1/reward_mean", EVERYTHING, evaluates=True)
    with pytest.raises(ConfigError, match="no such metric"):
        before("eval/words", EVERYTHING, evaluates=True)
    before("eval/words", EVERYTHING, evaluates=True, aggregates=True)


def test_callbacks_of_the_user_may_log_under_names_of_their_own():
    before("my_metric", others=True)
    with pytest.raises(ConfigError, match="no such metric"):
        before("turn_1/reward_maen", others=True)


def test_what_could_be_a_component_is_refused_once_the_components_are_known():
    logged = ["step", "turn_1/reward_mean", "turn_1/words_mean"]
    with pytest.raises(ConfigError, match=r"monitor='turn_1/wrods_mean'.*Did you mean 'turn_1/words_mean'.*Logged"):
        check_after("turn_1/wrods_mean", logged, LITTLE, "monitor")
    check_after("turn_1/words_mean", logged, LITTLE, "monitor")
    check_after("turn_2/words_mean", logged, EVERYTHING, "monitor")  # no row has got there yet
    check_after(
        "turn_1/wrods_mean", ["step", "eval/turn_1/reward_mean"], LITTLE, "monitor"
    )  # nothing trained is logged
    check_after("agent_0/grad_norm", logged, LITTLE, "monitor")  # no update has stepped yet


def test_what_the_aggregator_could_give_is_refused_once_it_has_given_something():
    check_after("eval/words", ["step", "turn_1/reward_mean"], EVERYTHING, "monitor")
    with pytest.raises(ConfigError, match="monitor='eval/words'"):
        check_after("eval/words", ["step", "eval/turn_1/reward_mean"], EVERYTHING, "monitor")


def test_a_name_of_the_users_own_is_refused_when_others_were_logged_and_it_was_not():
    check_after("my_metric", [], LITTLE, "monitor")
    with pytest.raises(ConfigError, match="Logged so far: step, turn_1/reward_mean"):
        check_after("my_metric", ["step", "turn_1/reward_mean"], LITTLE, "monitor")
