"""Both tutorials from Python, with names and with loaded models, on the embedded model and few tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mareinforce import MAGRPOConfig, MAGRPOTrainer, RewardProcessors
from mareinforce.assets import embedded_model
from mareinforce.tasks.story import improved_length_ratio_reward, length_feedback, length_ratio_reward

FOLDER = embedded_model("tiny-story")
PROMPTS = [{"prompt": "Tell a story about a lazy fox and a kite."}, {"prompt": "Write a story about a small cat."}]


def agents(how: str) -> dict:
    if how == "names":
        return {"agent_model": "tiny-story", "num_agents": 2}
    loaded = [AutoModelForCausalLM.from_pretrained(FOLDER) for _ in range(2)]
    return {"agents": loaded, "tokenizer": AutoTokenizer.from_pretrained(FOLDER)}


@pytest.mark.parametrize("how", ["names", "loaded models"])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_tutorial_trains_evaluates_and_saves(how, turns, tmp_path):
    trainer = MAGRPOTrainer(
        **agents(how),
        reward_func=length_ratio_reward if turns == 1 else improved_length_ratio_reward,
        reward_processor=RewardProcessors.scale(factor=100) if turns == 1 else None,
        external_transition=length_feedback if turns == 2 else None,
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS,
        args=MAGRPOConfig(
            num_turns=turns, num_train_epochs=1, num_generations=3, max_new_tokens=24, logging_steps=1,
            agent_learning_rate=1e-3, early_termination_threshold=0.999 if turns == 2 else None, eval_interval=0,
        ),
        default_root_dir=tmp_path,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    assert set(before) == {
        f"eval/turn_{turn}/{name}" for turn in range(1, turns + 1) for name in ("reward_mean", "expected_return")
    }
    trainer.save_model(tmp_path / "saved")
    start = AutoModelForCausalLM.from_pretrained(FOLDER)
    for agent in range(2):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / f"agent_{agent}")
        ids = AutoTokenizer.from_pretrained(tmp_path / "saved" / f"agent_{agent}")("Tell a story.", return_tensors="pt")
        with torch.no_grad():
            trained = trainer.module.team.model(agent)(**ids).logits
            assert torch.equal(saved(**ids).logits, trained)
            assert not torch.equal(start(**ids).logits, trained)
