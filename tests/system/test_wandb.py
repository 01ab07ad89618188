"""Weights & Biases: off unless asked for, and offline without a key or a question."""

from __future__ import annotations

from mareinforce import MAGRPOConfig, MAGRPOTrainer
from tests.learning.games import table_agents


def train(folder, **options):
    agents, tokenizer = table_agents(["go", "a", "b"], ["a", "b"])
    trainer = MAGRPOTrainer(
        agents=agents, tokenizer=tokenizer, reward_func=lambda first, second: [float(x == "a") for x in first],
        train_dataset=[{"prompt": "go"}] * 2, default_root_dir=folder, **options,
        args=MAGRPOConfig(num_turns=1, num_train_epochs=1, max_new_tokens=1, logging_steps=1, eval_interval=0),
    )  # fmt: skip
    trainer.train()
    return trainer.run_folder


def test_it_writes_below_the_run_folder_offline_and_nothing_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    asked = train(tmp_path / "asked", wandb_config={"project": "stories", "offline": True})
    wandb.finish()
    assert list(asked.glob("wandb/offline-run-*/*.wandb"))
    assert not (train(tmp_path / "not") / "wandb").exists()
