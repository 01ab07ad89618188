"""Callbacks in runs: what each one writes, when, and that none of them changes what is learned."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from IPython.lib.pretty import pretty
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from mareinforce.callbacks import (
    CompletionTable,
    EarlyTerminationLogger,
    EvaluationCallback,
    RolloutLog,
    ThroughputMonitor,
    TreeView,
    TurnRewardCurves,
)
from mareinforce.callbacks.trackers import log_page, log_picture, log_table
from matplotlib.image import imread

from mareinforce import fit
from mareinforce.errors import ConfigError
from mareinforce.phases import PHASES
from tests.models import llama_model, word_tokenizer
from tests.system.runs import Recorder, column, metrics, rank, rollouts, train, trainer, weights
from tests.system.test_evaluation import EVAL_ROWS, Played
from tests.system.test_resume import run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TURNS = {"num_turns": 3, "external_transition": lambda prompt: [prompt, prompt]}


def every_callback(**tables: Any) -> list[Any]:
    return [
        EarlyTerminationLogger(), EvaluationCallback(every_n_batches=2), TurnRewardCurves(every_n_seconds=1e-9),
        CompletionTable(every_n_env_steps=4, **tables), TreeView(every_n_env_steps=4), ThroughputMonitor(),
        RolloutLog(),
    ]  # fmt: skip


def screenshot(page: Path, to: Path) -> np.ndarray:
    """The page as a browser draws it: [height, width, RGB]."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb"]
    size = ["--window-size=1200,900", f"--user-data-dir={to.parent / 'browser'}"]
    command = [BROWSER, *flags, *size, f"--screenshot={to}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return (255 * imread(to)[..., :3]).round().astype(int)


def agree(first: list[str], second: list[str]) -> list[float]:
    return [float(a == b) for a, b in zip(first, second, strict=True)]


class TestTogether:
    def test_they_change_nothing_that_is_learned_in_whatever_order(self, tmp_path):
        def of(callbacks: list[Any]) -> tuple[Any, Any]:
            torch.manual_seed(0), np.random.seed(0)  # Python's own stream the type checks of the tests draw from
            models, tokenizer = _llamas()
            made = train(tmp_path, rank, (models, tokenizer), rows=("a", "b", "c d"), callbacks=callbacks, **TURNS,
                         early_termination_threshold=0.5, eval_dataset=["a", "c"], eval_interval=2, max_new_tokens=2,
                         early_termination_value="hold", early_termination_on="joint_action")  # fmt: skip
            return weights(models), (made, (float(torch.rand(())), float(np.random.rand())))

        (plain, (bare, drawn)), (one, (made, drawn_too)), (other, (turned, _)) = (
            of(callbacks) for callbacks in ([], every_callback(), list(reversed(every_callback())))
        )
        for learned in (one, other):
            assert all(torch.equal(w, a[n]) for p, a in zip(plain, learned, strict=True) for n, w in p.items())
        assert drawn == drawn_too
        names = {name for row in metrics(bare) for name in row}
        found, same = metrics(made), metrics(turned)
        assert [{n: row[n] for n in row if n in names} for row in found] == metrics(bare)
        timed = re.compile("seconds|tokens_per_second|reward_wait|memory")
        assert [{n: v for n, v in row.items() if not timed.search(n)} for row in found] == [
            {n: v for n, v in row.items() if not timed.search(n)} for row in same
        ]
        assert sorted(path.name for path in made.run_folder.iterdir()) == [
            "checkpoints", "completions.jsonl", "config.yaml", "metrics.csv", "reward_curves.png", "rollouts.jsonl",
            "trees",
        ]  # fmt: skip

    @pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
    def test_a_resumed_run_goes_on_with_all_of_them(self, tmp_path):
        batches = 3

        def options() -> dict[str, Any]:
            return {"callbacks": every_callback(console=False), "turns": 2, "early_termination_threshold": 7.0,
                    "early_termination_value": "hold", "early_termination_on": "joint_action",
                    "num_train_epochs": 1, "num_generations": 2}  # fmt: skip

        unbroken, _ = run(tmp_path / "unbroken", None, **options())
        stopped, _ = run(tmp_path / "stopped", batches, **options())
        checkpoint = next((stopped.run_folder / "checkpoints").glob(f"batch={batches}-*.ckpt"))
        resumed, _ = run(tmp_path / "stopped", None, resume=checkpoint, **options())
        assert resumed.run_folder == stopped.run_folder
        timed = re.compile("seconds|tokens_per_second|reward_wait|memory")
        rows = [
            [{n: v for n, v in row.items() if not timed.search(n)} for row in metrics(made)]
            for made in (unbroken, resumed)
        ]
        assert rows[0] == rows[1]
        assert "tokens" in rows[0][-1]
        assert any("turn_1/stopped_reward_mean" in row for row in rows[0])
        for name in ("completions.jsonl", "rollouts.jsonl"):
            one, other = ((made.run_folder / name).read_text() for made in (unbroken, resumed))
            assert one == other
        pages = [sorted(path.name for path in (made.run_folder / "trees").iterdir()) for made in (unbroken, resumed)]
        assert pages[0] == pages[1]

    def test_each_can_be_named_in_a_yaml(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        tokenizer = word_tokenizer()
        llama_model(len(tokenizer)).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        named = [
            {"class_path": f"mareinforce.callbacks.{name}", "init_args": options}
            for name, options in {
                "EarlyTerminationLogger": {"batches_before_saying": 2},
                "EvaluationCallback": {"every_n_env_steps": 4, "num_samples": "all", "mode": "max"},
                "TurnRewardCurves": {"every_n_seconds": None}, "CompletionTable": {"every_n_env_steps": 2},
                "TreeView": {"every_n_env_steps": 2, "console": True}, "ThroughputMonitor": {},
            }.items()
        ]  # fmt: skip
        recipe = {
            "model": {"agent_model": "model", "reward_func": "tests.system.test_callbacks.agree",
                      "config": {"num_turns": 1, "num_train_epochs": 1, "num_generations": 2, "max_new_tokens": 3,
                                 "rollout_buffer_size": 1, "logging_steps": 1}},
            "data": {"train": ["a b", "c d"], "eval": ["e"]},
            "trainer": {"accelerator": "cpu", "enable_progress_bar": False, "callbacks": named},
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        assert fit.main(["--config", "recipe.yaml"]) == 0
        captured = capsys.readouterr()
        out = captured.out + captured.err
        assert "joint answers at environment step 2" in out
        assert "Rollout tree of row" in out
        assert len(list((tmp_path / "runs/run_0001/trees").iterdir())) == 2


def _llamas() -> tuple[list[Any], Any]:
    words = word_tokenizer()
    return [llama_model(len(words), seed=seed) for seed in range(2)], words


class TestEarlyTermination:
    def test_what_was_saved_is_what_a_full_tree_has_more(self, tmp_path):
        reward = Recorder()  # 0, 1 ...: the second joint answer of every node stops
        made = train(
            tmp_path, reward, rows=("go", "go"), **TURNS, num_generations=2, logging_steps=100,
            early_termination_threshold=0.5, early_termination_on="joint_action", early_termination_value="hold",
            callbacks=[EarlyTerminationLogger()],
        )  # fmt: skip
        (row,) = metrics(made)
        full = 2 * (2 + 4 + 8)
        assert row["turn_1/saved_joint_actions"] + row["turn_2/saved_joint_actions"] == full - reward.joint_actions
        assert row["turn_1/saved_joint_actions"] == 2 * (2 + 4)
        assert row["turn_1/saved_tokens"] == 2 * 2 * (2 + 4)  # two agents, a token each
        assert (row["turn_1/stopped_fraction"], row["turn_1/stopped_reward_mean"]) == (0.5, 1.0)
        assert not any(name.startswith("turn_3/s") for name in row if "stopped" in name or "saved" in name)

    def test_whole_nodes_are_counted_with_their_mean_reward(self, tmp_path):
        score = Recorder(lambda *texts: [3.0, 1.0] if score.known[-1]["prompts"][0] == "go" else [0.0, 0.0])
        made = train(
            tmp_path, score, rows=("go", "on", "on", "on"), **TURNS, logging_steps=100, early_termination_threshold=0.5,
            early_termination_value="hold", callbacks=[EarlyTerminationLogger()],
        )  # fmt: skip
        (row,) = metrics(made)
        assert (row["turn_1/stopped_fraction"], row["turn_1/stopped_reward_mean"]) == (0.25, 2.0)
        assert row["turn_2/stopped_fraction"] == 0.0
        assert "turn_2/stopped_reward_mean" not in row

    @pytest.mark.parametrize("options", [{"early_termination_threshold": None, **TURNS}, {"num_turns": 1}])
    def test_nothing_is_said_where_nothing_can_stop(self, tmp_path, options):
        fields = {"early_termination_threshold": 0.5, **options}
        made = train(tmp_path, callbacks=[EarlyTerminationLogger()], **fields)
        assert not [name for name in metrics(made)[0] if "stopped" in name or "saved" in name]

    @pytest.mark.parametrize(
        ("threshold", "scores", "said"),
        [(0.5, [1.0] * 6, 1), (0.5, [1.0, 1.0, 0.0] * 2, 0), (-2.0, [-1.0] * 6, 1)],
    )
    def test_it_says_once_that_everything_stops(self, tmp_path, caplog, threshold, scores, said):
        left = list(scores)
        with caplog.at_level(logging.INFO):
            train(
                tmp_path, lambda *texts: [left.pop(0) if texts else 0.0] * 2, rows=("go",) * 6, num_turns=2,
                external_transition=lambda prompt: None, early_termination_threshold=threshold,
                early_termination_value="hold", callbacks=[EarlyTerminationLogger(batches_before_saying=3)],
            )  # fmt: skip
        words = [r.getMessage() for r in caplog.records if "has stopped every branch" in r.getMessage()]
        assert len(words) == said
        if said:
            assert f"early_termination_threshold={threshold}" in words[0]
            assert f"in the last 3 batches (mean reward {scores[0]:.4g}): turns 2 to 2 do not happen" in words[0]

    def test_it_leaves_to_the_run_what_the_run_says(self, tmp_path, caplog):
        with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="stops every branch after turn 1"):
            train(
                tmp_path, rows=("go",) * 4, num_turns=2, external_transition=lambda prompt: None,
                early_termination_threshold=-0.2, early_termination_value="hold",
                callbacks=[EarlyTerminationLogger(batches_before_saying=2)],
            )  # fmt: skip
        assert not [r for r in caplog.records if "has stopped every branch" in r.getMessage()]

    def test_a_number_below_one_is_refused(self):
        with pytest.raises(ConfigError, match="EarlyTerminationLogger batches_before_saying=0: must be at least 1"):
            EarlyTerminationLogger(0)


class TestEvaluation:
    @pytest.mark.parametrize(
        ("options", "kinds"),
        [
            ({}, "etttettt"), ({"every_n_batches": 2}, "ettetettet"), ({"every_n_batches": 0}, "tttttt"),
            ({"every_n_env_steps": 4}, "ettettett"), ({"every_n_env_steps": 5}, "etttettt"),
            ({"every_n_env_steps": 100}, "etttttt"),
        ],
    )  # fmt: skip
    def test_it_replaces_the_schedule_of_the_configuration(self, tmp_path, options, kinds):
        reward = Played()
        made = train(
            tmp_path, reward, rows=("go", "on", "up"), num_train_epochs=2, eval_interval=3, eval_dataset=EVAL_ROWS,
            eval_num_samples=1, callbacks=[EvaluationCallback(**options)],
        )  # fmt: skip
        assert reward.kinds == kinds
        assert len(column(made, "eval/turn_1/reward_mean")) == kinds.count("e")

    @pytest.mark.parametrize(("num_samples", "played"), [(None, 4), (2, 2), ("all", 6)])
    def test_how_many_rows_are_played(self, tmp_path, num_samples, played):
        reward = Played()
        callback = EvaluationCallback(every_n_batches=1, num_samples=num_samples)
        train(tmp_path, reward, eval_dataset=EVAL_ROWS, eval_num_samples=4, callbacks=[callback])
        assert len(reward.evaluated) == played

    @pytest.mark.parametrize(
        ("mode", "best", "steps"), [("max", [1.0, 3.0, 3.0, 3.0], [0, 2, 2, 2]), ("min", [1, 1, 1, 0], [0, 0, 0, 6])]
    )
    def test_the_best_so_far_and_where_it_was_found(self, tmp_path, mode, best, steps):
        values = [1.0, 3.0, 3.0, 0.0]
        made = train(
            tmp_path, rows=("go",) * 4, eval_dataset=["go"], eval_logger=lambda batch_items: [{}],
            eval_aggregator=lambda metrics: {"mine": values.pop(0)},
            callbacks=[EvaluationCallback(every_n_batches=1, monitor="eval/mine", mode=mode, save_best=True)],
        )  # fmt: skip
        assert column(made, "eval/best") == best
        assert column(made, "eval/best_step") == steps
        assert sorted(path.name for path in (made.run_folder / "best_agents").iterdir()) == ["agent_0", "agent_1"]

    def test_a_step_that_is_given_up_is_not_among_what_is_kept(self, tmp_path):
        callback = EvaluationCallback(every_n_env_steps=2)
        made = trainer(tmp_path, rows=("go",) * 3, eval_dataset=["go"], callbacks=[callback])
        kept: list[dict[str, Any]] = []
        whole = made.module.rollout

        def rollout(rows: Any) -> Any:
            kept.append(callback.state_dict())  # what a checkpoint would hold if a signal came here
            return whole(rows)

        made.module.rollout = rollout
        made.train()
        assert [state["evaluated_at"] for state in kept] == [None, 0, 2]
        assert callback.state_dict()["evaluated_at"] == 4

    def test_a_metric_that_there_is_not_is_named(self, tmp_path):
        callback = EvaluationCallback(every_n_batches=1, monitor="eval/turn_1/reward")
        with pytest.raises(ConfigError, match=r"monitor='eval/turn_1/reward'.*Did you mean 'eval/turn_1/reward_mean'"):
            train(tmp_path, eval_dataset=["go"], callbacks=[callback])

    def test_a_schedule_without_rows_is_refused_before_anything_is_trained(self, tmp_path):
        reward = Recorder()
        with pytest.raises(ConfigError, match=r"name rows in data\.eval"):
            train(tmp_path, reward, callbacks=[EvaluationCallback(every_n_batches=1)])
        assert not reward.texts
        train(tmp_path, reward, callbacks=[EvaluationCallback()])  # asks for nothing by itself

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"every_n_batches": 1, "every_n_env_steps": 1}, "not both"),
            ({"every_n_env_steps": 0}, "every_n_env_steps=0: must be a whole number of at least 1"),
            ({"num_samples": "some"}, "num_samples='some'"),
            ({"mode": "best"}, "mode='best': must be max or min"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, options, words):
        with pytest.raises(ConfigError, match=f"EvaluationCallback.*{words}"):
            EvaluationCallback(**options)


class FakeWandb(WandbLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, dict[str, Any]]] = []
        self._experiment = self._id = self._name = None

    @property
    def experiment(self) -> Any:
        return self

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.given.append((step or 0, dict(metrics)))

    def finalize(self, status: str) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    settings = SimpleNamespace(save_models=False)

    def close(self, status: int = 0) -> None:
        pass


def tracked(monkeypatch, made: Any) -> FakeWandb:
    tracker = FakeWandb()
    monkeypatch.setattr(made, "_wandb", object())
    monkeypatch.setattr("mareinforce.trainers.reinforce.WandbTracker", lambda *_: tracker)
    return tracker


class TestCompletions:
    def lines(self, made: Any) -> list[dict[str, Any]]:
        return rollouts(made, "completions.jsonl")

    def test_a_line_is_a_joint_answer_and_says_what_the_rollouts_say(self, tmp_path):
        made = train(
            tmp_path, rows=("go", "on"), **{**TURNS, "num_turns": 2}, num_generations=3,
            callbacks=[CompletionTable(every_n_env_steps=1, num_samples=2, console=False), RolloutLog()],
        )  # fmt: skip
        found = self.lines(made)
        assert [(line["batch"], line["turn"]) for line in found] == [
            (1, 1), (1, 1), (1, 2), (1, 2), (2, 1), (2, 1), (2, 2), (2, 2)
        ]  # fmt: skip
        whole = {(line["env_step"], line["k"], line["agent"]): line for line in rollouts(made)}
        for line in found:
            for agent, said in enumerate(line["agents"]):
                other = whole[line["env_step"], line["joint_action"], agent]
                for name in ("completion", "prompt", "ended", "tokens", "return", "advantage"):
                    assert said[name] == other[name]
                for name in ("reward", "raw_reward", "row", "path"):
                    assert line[name] == other[name]
        assert len({(line["env_step"], line["joint_action"]) for line in found}) == len(found)

    def test_how_often(self, tmp_path):
        made = train(tmp_path, rows=("go",) * 6, callbacks=[CompletionTable(every_n_env_steps=4, console=False)])
        assert sorted({line["env_step"] for line in self.lines(made)}) == [2, 6, 10]

    def test_an_idle_agent_has_no_answer(self, tmp_path):
        made = train(
            tmp_path, formatters=[lambda row: row["prompt"], lambda row: None],
            callbacks=[CompletionTable()],
        )  # fmt: skip
        assert [line["agents"][1] for line in self.lines(made)] == [None, None]

    def test_the_console_shows_texts_rewards_and_what_was_cut(self, tmp_path, capsys):
        models, tokenizer = _llamas()
        train(tmp_path, agents=(models, tokenizer), rows=("a b",), max_new_tokens=2, callbacks=[CompletionTable()])
        captured = capsys.readouterr()
        out = captured.out + captured.err
        assert "joint answers at environment step 2" in out
        assert "[cut]" in out
        assert "\x1b" not in out.split("joint answers")[1].split("Trainer.fit")[0]  # no terminal: no colours

    def test_the_tracker_gets_a_table_that_keeps_what_was_sent(self, tmp_path, monkeypatch):
        made = trainer(tmp_path, rows=("go",) * 3, callbacks=[
            CompletionTable(every_n_env_steps=1, num_samples=1, console=False, max_rows=2)])  # fmt: skip
        tracker = tracked(monkeypatch, made)
        made.train()
        sent = [(step, given["completions"]) for step, given in tracker.given if "completions" in given]
        assert [step for step, _ in sent] == [2, 4, 6]
        assert [[row[0] for row in table.data] for _, table in sent] == [[2, 2], [2, 2, 4, 4], [4, 4, 6, 6]]
        assert sent[0][1].columns[:2] == ["env_step", "turn"]


class TestTrees:
    def test_a_page_says_everything_and_needs_nothing(self, tmp_path, monkeypatch):
        view = TreeView(every_n_env_steps=1, keep_last=2)
        models, tokenizer = _llamas()
        made = trainer(
            tmp_path, rank, (models, tokenizer), rows=({"prompt": "a <b> & c"},) * 3, num_turns=2, max_new_tokens=3,
            external_transition=lambda prompt: [prompt, prompt], early_termination_threshold=0.5,
            early_termination_on="joint_action", early_termination_value="hold",
            callbacks=[view, RolloutLog()],
        )  # fmt: skip
        tracker = tracked(monkeypatch, made)
        made.train()
        pages = sorted((made.run_folder / "trees").iterdir())
        assert [page.name for page in pages] == ["step_000000008.html", "step_000000012.html"]
        html = pages[-1].read_text()
        assert not re.search(r"(src|href|url)\s*[=(]|<script|<link", html)
        assert "a &lt;b&gt; &amp; c" in html
        assert "<b> &" not in html
        from html import escape

        last = [line for line in rollouts(made) if line["batch"] == 3]
        assert len(last) == 8
        for line in last:
            assert f"<pre>{escape(line['completion']) or '&nbsp;'}</pre>" in html
            assert f"advantage {line['advantage']:+.3f}" in html
        assert html.count('<span class="badge stop">stopped early</span>') == 1  # at the last turn nothing stops
        assert html.count("<rect") == 1
        assert view._repr_html_() in html
        assert pretty(view) == pretty(view.page) == str(view.page)
        assert str(view.page).count("stopped early") == 2  # once in the facts
        assert [step for step, given in tracker.given if "tree" in given] == [4, 8, 12]

    @pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
    def test_a_browser_draws_nodes_rewards_and_texts(self, tmp_path):
        made = trainer(
            tmp_path, rank, _llamas(), rows=({"prompt": "go on"},), num_turns=2, max_new_tokens=3,
            external_transition=lambda prompt: [prompt, prompt], callbacks=[TreeView(every_n_env_steps=1)],
        )  # fmt: skip
        made.train()
        (page,) = (made.run_folder / "trees").iterdir()
        dots = re.findall(r'<circle[^>]*fill="rgb\((\d+),(\d+),(\d+)\)"', page.read_text())
        colours = {tuple(map(int, each)) for each in dots}
        assert len(colours) > 1  # one a reward
        drawn = screenshot(page, tmp_path / "drawn.png")
        assert [colour for colour in colours if not (drawn == colour).all(-1).any()] == []
        assert (drawn.sum(-1) < 300).sum() > 1000  # letters

    def test_before_the_first_tree_a_notebook_is_told_so(self):
        assert "no tree yet" in TreeView()._repr_html_()
        assert pretty(TreeView()) == "no tree yet"

    @pytest.mark.parametrize("kind", [CompletionTable, TreeView])
    def test_a_number_below_one_is_refused(self, kind):
        with pytest.raises(ConfigError, match=f"{kind.__name__} every_n_env_steps=0: must be at least 1"):
            kind(every_n_env_steps=0)


class TestThroughput:
    def test_seconds_add_up_and_tokens_are_all_that_was_sampled(self, tmp_path):
        made = train(
            tmp_path, rows=("go",) * 3, eval_dataset=["go"], eval_interval=1,
            callbacks=[ThroughputMonitor(), RolloutLog()],
        )  # fmt: skip
        rows = [row for row in metrics(made) if "tokens" in row]
        assert [row["tokens"] for row in rows] == [4, 8, 12]
        assert rows[-1]["tokens"] == sum(line["tokens"] for line in rollouts(made))
        before = 0.0
        for row in rows:
            parts = [row[f"seconds/{name}"] for name in (*PHASES, "other")]
            elapsed = row["seconds"] - before
            before = row["seconds"]
            assert sum(parts) == pytest.approx(elapsed, rel=1e-6)
            assert row["tokens_per_second"] == pytest.approx(4 / elapsed, rel=1e-6)
            assert row["generation_tokens_per_second"] == pytest.approx(4 / row["seconds/generation"], rel=1e-6)
            assert min(parts) >= 0.0
            assert all(
                row[f"seconds/{name}"] > 0 for name in ("generation", "reward", "scoring", "update", "evaluation")
            )
        assert 0.01 < rows[-1]["memory/process_gib"] < 100

    def test_a_slow_reward_is_what_the_device_waits_for(self, tmp_path):
        import time

        def slow(*texts: list[str]) -> list[float]:
            time.sleep(0.4)
            return rank(*texts)

        quick, waiting = (train(tmp_path, reward, callbacks=[ThroughputMonitor()]) for reward in (rank, slow))
        assert column(waiting, "seconds/reward")[0] >= 0.4
        assert column(waiting, "reward_wait_fraction")[0] > column(quick, "reward_wait_fraction")[0]
        assert column(quick, "seconds/reward")[0] < 0.4


def test_pictures_go_to_the_tracker(tmp_path, monkeypatch):
    made = trainer(tmp_path, rows=("go",) * 2, callbacks=[TurnRewardCurves(every_n_seconds=1e-9)])
    tracker = tracked(monkeypatch, made)
    made.train()
    sent = [step for step, given in tracker.given if "reward_curves" in given]
    assert sent[0] == 2  # while it goes on
    assert sent[-1] == 4
    assert Path(made.run_folder / "reward_curves.png").exists()


def test_the_real_client_writes_picture_table_and_page_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    made = train(
        tmp_path, rows=("go", "on"), wandb_config={"project": "stories", "offline": True},
        callbacks=[TurnRewardCurves(), TreeView(every_n_env_steps=1),
                   CompletionTable(every_n_env_steps=1, num_samples=1, console=False)],
    )  # fmt: skip
    wandb.finish()
    (media,) = made.run_folder.glob("wandb/offline-run-*/files/media")
    (picture,) = media.glob("images/reward_curves_*.png")
    assert picture.read_bytes() == (made.run_folder / "reward_curves.png").read_bytes()
    tables = [json.loads(path.read_text()) for path in sorted(media.glob("table/completions_*.json"))]
    assert sorted(len(table["data"]) for table in tables) == [2, 4]  # a line an agent; the second one has both answers
    pages = {path.read_text() for path in media.glob("html/tree_*.html")}
    assert pages == {path.read_text() for path in (made.run_folder / "trees").iterdir()}


class FakeBoard(TensorBoardLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    @property
    def experiment(self) -> Any:
        return self

    def add_image(self, key: str, image: Any, step: int, dataformats: str) -> None:
        self.given[key] = (image.shape, step, dataformats)

    def add_text(self, key: str, text: str, step: int) -> None:
        self.given[key] = (text, step)


def test_tensorboard_gets_a_picture_and_text(tmp_path):
    made = train(tmp_path, callbacks=[TurnRewardCurves()])
    board = FakeBoard()
    log_picture([board], "curves", made.run_folder / "reward_curves.png", 2)
    log_table([board], "answers", ["step", "text"], [[2, "a|b\nc"], [0.25, "d"]], 2)
    log_page([board], "tree", "<p>", "turn 1\n└─ 0", 2)
    assert board.given["curves"][1:] == (2, "HWC")
    assert board.given["curves"][0][:2] == (520, 910)
    assert board.given["answers"] == ("| step | text |\n| --- | --- |\n| 2 | a\\|b<br>c |\n| 0.25 | d |", 2)
    assert board.given["tree"] == ("    turn 1\n    └─ 0", 2)
