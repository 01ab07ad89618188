"""Agents that generate and update at the same time: the same results, failures told, devices that must be there."""

from __future__ import annotations

import threading

import pytest

from mareinforce.agents.team import Team
from mareinforce.errors import AgentError, ConfigError
from tests.lora import LORA, same, save_base
from tests.system.runs import llama_team, rank, train, trainer

FIELDS = {"max_new_tokens": 4, "num_generations": 4, "agent_learning_rate": 0.01, "rows": ("a", "b c", "d")}


def run(folder, base, lora=LORA, reward=rank, **options):
    return trainer(folder, reward, ([base] * 2, None), **FIELDS, model_config={"lora": lora}, **options)


@pytest.fixture
def base(tmp_path):
    return save_base(tmp_path / "base")


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_they_learn_what_they_would_one_after_the_other(tmp_path, base, lora):
    runs, threads, others = [], [], set(threading.enumerate())

    def workers():
        names = [thread.name for thread in set(threading.enumerate()) - others]
        return sorted(name.split("_")[0] for name in names if name.startswith("network"))

    def reward(*texts):
        threads.append(workers())
        return rank(*texts)

    for options in ({}, {"parallel_training": "mp", "agent_devices": "cpu"}):
        made = run(tmp_path, base, lora=lora, reward=reward, reference_kl_enabled=True, **options)
        made.train()
        runs.append((made.module.team.state_dict(), (made.run_folder / "metrics.csv").read_text()))
        assert workers() == []  # nothing is left running
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert threads == [[]] * 3 + [["network-0"] if lora else ["network-0", "network-1"]] * 3


def test_a_failing_agent_is_named_where_the_run_was_started(tmp_path):
    (first, second), words = llama_team()
    second.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    options = {**FIELDS, "agents": ([first, second], words)}
    with pytest.raises(AgentError, match=r"^agent 1: its worker failed: ZeroDivisionError") as failure:
        train(tmp_path, parallel_training="mp", agent_devices="cpu", **options)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, **options)


def test_devices_are_asked_for(tmp_path, base):
    with pytest.raises(ConfigError, match="parallel_training='mp' needs agent_devices"):
        run(tmp_path, base, parallel_training="mp")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("cuda:7", "no such device|has .* cuda device"),
        ("tpu9", "is no device"),
        ("meta", "no such device"),
        (["cpu", "cuda:7"], "'cuda:7'"),
        (["cpu"], "lists 1 for 2 agents"),
    ],
)
def test_devices_that_are_not_here_are_refused_before_anything_loads(tmp_path, monkeypatch, base, devices, message):
    monkeypatch.setattr(Team, "build", lambda **_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=message) as refusal:
        run(tmp_path, base, agent_devices=devices)
    assert "agent_devices" in str(refusal.value)
