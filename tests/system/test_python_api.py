"""`MAGRPOTrainer` and its siblings, as they are used from Python."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mareinforce
from mareinforce import (
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLOOConfig,
    MARLOOTrainer,
)
from mareinforce.errors import ConfigError, PromptError
from mareinforce.rewards import RewardProcessors
from tests.models import gpt2_model, llama_model, word_tokenizer
from tests.system.runs import STATES, Recorder, column, llama_team, rank, table_team, train, trainer, unchanged, weights

KINDS = [
    (MAGRPOTrainer, MAGRPOConfig, "mean"),
    (MARLOOTrainer, MARLOOConfig, "rloo"),
    (MAReMaxTrainer, MAReMaxConfig, "max"),
    (MAREINFORCETrainer, MAREINFORCEConfig, "raw"),
]


@pytest.mark.parametrize(("kind", "config", "mode"), KINDS)
def test_names_are_the_same_wherever_they_are_imported_from(kind, config, mode):
    trainers = importlib.import_module("mareinforce.trainers.reinforce")
    for one in (kind, config):
        assert getattr(mareinforce, one.__name__) is getattr(trainers, one.__name__) is one
        assert one.__name__ in mareinforce.__all__
        assert one.__name__ in trainers.__all__
    assert mareinforce.RewardProcessors is RewardProcessors
    assert config().advantage_mode == mode
    with pytest.raises(AttributeError, match="MAGRPO2"):
        mareinforce.MAGRPO2  # noqa: B018


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, _, mode in KINDS])
def test_each_trainer_brings_its_own_baseline(tmp_path, kind, mode):
    losses = {"mean": 0.0, "rloo": 0.0, "max": -1.0, "raw": 1.0}  # mean advantage of rewards 0 and 2
    made = train(tmp_path, lambda *texts: [0.0, 2.0], kind=kind)
    assert made.module.config.advantage_mode == mode
    assert column(made, "agent_0/loss") == pytest.approx([losses[mode] * 0.6931472], abs=1e-5)


def test_without_args_the_defaults_are_the_algorithms_own():
    models, tokenizer = table_team(3)
    made = MARLOOTrainer(
        agents=models, tokenizer=tokenizer, reward_func=rank, external_transition=lambda num_agents: ["go"] * num_agents
    )
    assert made.args == MARLOOConfig(num_agents=3)
    assert made.module.config.advantage_mode == "rloo"


def test_the_number_of_agents_comes_from_the_list_of_them(tmp_path):
    made = trainer(tmp_path, agents=table_team(3))
    assert made.module.config.num_agents == 3
    assert made.module.updates == [0, 0, 0]


@pytest.mark.parametrize("how", ["agent_model", "agents"])
def test_folders_are_loaded_trained_and_saved(tmp_path, how):
    models, tokenizer = llama_team(1)
    models[0].save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    reward = Recorder()
    made = MAGRPOTrainer(
        **({"agent_model": base, "num_agents": 2} if how == "agent_model" else {"agents": [base, base]}),
        reward_func=reward, train_dataset=["a", "b c"], default_root_dir=tmp_path / "runs", accelerator="cpu",
        args=MAGRPOConfig(num_turns=1, num_train_epochs=1, max_new_tokens=4, agent_learning_rate=[0.01, 0.1]),
    )  # fmt: skip
    assert made.module.team is None  # nothing is loaded before it is needed
    made.train()
    learned = [made.module.team.model(agent) for agent in range(2)]
    assert unchanged(weights(models * 2), learned) == [False, False]
    assert unchanged(weights(learned[:1]), learned[1:]) == [False]
    assert made.run_folder == tmp_path / "runs" / "run_0001"
    made.save_model(tmp_path / "saved")
    made.save_model(tmp_path / "saved")  # again, over it
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["agent_0", "agent_1"]
    ids = torch.tensor([[5, 6, 7]])
    for agent, model in enumerate(learned):
        folder = tmp_path / "saved" / f"agent_{agent}"
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)
            assert not torch.equal(loaded(ids).logits, learned[1 - agent](ids).logits)
        assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == tokenizer("a b")["input_ids"]


def test_a_loaded_model_and_a_folder_can_be_agents_together(tmp_path):
    (model, other), tokenizer = llama_team(2)
    other.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    made = trainer(tmp_path, agents=([model, str(tmp_path / "base")], [tokenizer, None]), rows=["a"], max_new_tokens=3)
    made.save_model(tmp_path / "untrained")  # loads what is not loaded
    assert made.module.team.model(0) is model
    assert unchanged(weights([other]), [made.module.team.model(1)]) == [True]
    assert sorted(path.name for path in (tmp_path / "untrained").iterdir()) == ["agent_0", "agent_1"]
    made.train()
    assert unchanged(weights([other]), [made.module.team.model(1)]) == [False]


def test_mixed_models_each_with_its_tokenizer_train_together(tmp_path):
    words, others = word_tokenizer(pad=None), word_tokenizer(("go", "stop", "a", "b", "c"))
    models = [gpt2_model(len(words)), llama_model(len(others))]
    before = weights(models)
    reward = Recorder()
    made = train(
        tmp_path, reward, (models, [words, others]), rows=["a b", "c"], num_turns=2, num_generations=3,
        max_new_tokens=4, external_transition=lambda agent_completions: [f"a {text}" for text in agent_completions],
    )  # fmt: skip
    assert unchanged(before, models) == [False, False]
    said = [" ".join(text for texts in reward.texts for text in texts[agent]).split() for agent in range(2)]
    assert set(said[1]) <= {"go", "stop", "a", "b", "c", ""}
    assert not set(said[0]) <= {"go", "stop", "a", "b", "c", ""}
    assert words.pad_token is None
    made.save_model(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved" / "agent_0").pad_token is None
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "agent_1")) is type(models[1])


def test_models_given_loaded_are_trained_in_place_and_keep_their_flags(tmp_path):
    agents = llama_team()
    agents[0][0].train()
    before, flags = weights(agents[0]), [model.training for model in agents[0]]
    shipped = [model.generation_config for model in agents[0]]
    train(tmp_path, agents=agents, rows=["a"], max_new_tokens=4, num_generations=4)
    assert unchanged(before, agents[0]) == [False, False]
    assert [model.training for model in agents[0]] == flags
    assert all(model.generation_config is config for model, config in zip(agents[0], shipped, strict=True))


def test_evaluate_works_before_and_after_training_with_a_transition(tmp_path):
    made = trainer(
        tmp_path, lambda first, second: [float((one + two).count("x")) for one, two in zip(first, second, strict=True)],
        rows=["go"] * 10, num_turns=2, num_generations=8, agent_learning_rate=0.5, discount=0.5,
        external_transition=lambda num_agents: ["on", "up"], eval_dataset=["go"] * 12, eval_temperature=None,
    )  # fmt: skip
    before = made.evaluate(12)
    made.train()
    after = made.evaluate(num_eval_samples=12)
    names = {f"eval/turn_{turn}/{name}" for turn in (1, 2) for name in ("reward_mean", "expected_return")}
    assert set(before) == set(after) == names
    assert before["eval/turn_1/reward_mean"] < 1.5
    assert after["eval/turn_1/reward_mean"] > 1.8
    for found in (before, after):
        together = found["eval/turn_1/reward_mean"] + 0.5 * found["eval/turn_2/reward_mean"]
        assert found["eval/turn_1/expected_return"] == pytest.approx(together)


def test_evaluation_needs_rows(tmp_path):
    with pytest.raises(ConfigError, match="eval_dataset is missing"):
        trainer(tmp_path).evaluate()


def test_every_training_has_a_folder_of_its_own_and_goes_on_learning(tmp_path):
    agents = table_team()
    options = {"rows": STATES, "lr_schedule": "linear", "num_generations": 8}
    made = train(tmp_path, agents=agents, **options)
    first, before = made.run_folder, weights(agents[0])
    made.train()
    assert (first.name, made.run_folder.name) == ("run_0001", "run_0002")
    assert unchanged(before, agents[0]) == [False, False]
    assert column(made, "agent_0/learning_rate")[0] > 0


def test_a_prompt_that_does_not_fit_is_told_before_anything_is_sampled(tmp_path):
    words, reward = word_tokenizer(), Recorder()
    agents = [gpt2_model(len(words), positions=32, seed=seed) for seed in range(2)], words
    rows = [" ".join("a" * count) for count in (24, 30)]
    with pytest.raises(PromptError, match=r"row 1, turn 1: agent 0: the prompt has 30 tokens.*=8 .* context of 32"):
        train(tmp_path, reward, agents, rows, max_new_tokens=8)
    assert reward.texts == []
    train(tmp_path, reward, agents, rows[:1], max_new_tokens=8)  # 24 + 8 is exactly 32
    assert len(reward.texts) == 1


@pytest.mark.parametrize(
    "reward",
    [
        lambda first, second, **known: {"reward": rank(first), "length": [len(text) for text in first]},
        lambda prompts, first, second: rank(first) if prompts == ["go"] * 2 else None,
        lambda *texts: torch.tensor(rank(*texts), dtype=torch.bfloat16, requires_grad=True),
    ],
    ids=["components", "prompts first", "tensor"],
)
def test_rewards_of_every_shape_are_taken(tmp_path, reward):
    made = train(tmp_path, reward)
    assert column(made, "turn_1/reward_mean") == [0.5]
    assert column(made, "turn_1/length_mean") in ([], [1.0])


def test_an_async_reward_is_awaited(tmp_path):
    async def reward(first, second):
        return rank(first)

    assert column(train(tmp_path, reward), "turn_1/reward_mean") == [0.5]
