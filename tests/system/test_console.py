"""What a run says on the console: what is trained, how far it is, what came of it; clean where there is no terminal."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.callbacks import TQDMProgressBar
from mareinforce.callbacks import CompletionTable
from rich.console import Console

from mareinforce import MAGRPOConfig, MAGRPOTrainer, fit
from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.progress import PHASES, RunProgress, batch_values, in_words, status
from mareinforce.rollout.tree import Node
from mareinforce.run_header import count_weights, header, memory, most_joint_actions
from mareinforce.run_summary import NOTHING_LEARNED, first_and_last, print_summary, summary, summary_table
from tests.models import llama_model, word_tokenizer
from tests.system.runs import llama_team, metrics, rank, train, trainer

RUN = {
    "rows": ["go", "on", "up"],
    "num_train_epochs": 2,
    "eval_dataset": ["go"],
    "eval_interval": 2,
    "num_turns": 2,
    "external_transition": lambda num_agents: ["on"] * num_agents,
}
ESCAPE = "\x1b"


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80)


def written(where: Console) -> str:
    return where.file.getvalue()  # type: ignore[attr-defined]


def plain(where: Console) -> str:
    """Without colours and movements."""
    return re.sub(rf"{ESCAPE}\[[\d;?]*[a-zA-Z]", "", written(where))


# progress


def test_elsewhere_than_in_a_terminal_there_is_a_plain_line_a_row(tmp_path):
    out = console()
    made = train(tmp_path, callbacks=[RunProgress(out)], **RUN)
    lines, rows = written(out).splitlines(), metrics(made)
    assert ESCAPE not in written(out)
    assert "\r" not in written(out)
    assert len(lines) == len(rows) == 10
    assert [line.startswith("evaluation") for line in lines] == ["eval/turn_1/reward_mean" in row for row in rows]
    first = next(line for line in lines if not line.startswith("evaluation"))
    assert re.fullmatch(
        r"epoch 1/2, batch 1, step 6: reward 0\.5, 0\.5  return 1  entropy 0\.6\d+  [\d,]+ tokens/s", first
    )
    assert lines[-1].startswith("epoch 2/2, batch 6, step 36: ")


def test_there_is_no_line_between_rows_and_one_for_what_is_left_at_the_end(tmp_path):
    out = console()
    train(tmp_path, callbacks=[RunProgress(out)], **RUN | {"logging_steps": 12, "rows": ["go"] * 3, "eval_interval": 0})
    assert [line.split(":")[0] for line in written(out).splitlines()] == [
        "epoch 1/2, batch 2, step 12", "epoch 2/2, batch 4, step 24", "epoch 2/2, batch 6, step 36"
    ]  # fmt: skip
    out = console()
    train(tmp_path, callbacks=[RunProgress(out)], logging_steps=100, rows=["go"] * 3)
    assert [line.split(":")[0] for line in written(out).splitlines()] == ["epoch 1/1, batch 3, step 6"]


def test_lines_of_one_second_are_printed_together_and_before_anything_else(tmp_path, monkeypatch):
    out, printed = console(), []
    bar = RunProgress(out)
    monkeypatch.setattr(out.file, "write", lambda text: printed.append(text.count("\n")) or len(text))
    monkeypatch.setattr("mareinforce.progress._SECONDS_BETWEEN", 1000.0)
    fields = RUN | {"eval_interval": 0, "logging_steps": 6}

    def reward(*texts):
        if len(rewarded) == 10:  # in the fourth batch
            bar.print("beside it")
        rewarded.append(1)
        return [1.0] * len(texts[0])

    rewarded: list[int] = []
    train(tmp_path, reward, callbacks=[bar], **fields)
    assert [lines for lines in printed if lines] == [1, 2, 1, 3]  # the first is told at once


def test_in_a_terminal_there_are_two_lines_and_the_cursor_is_given_back(tmp_path):
    out = console(terminal=True)
    train(tmp_path, callbacks=[RunProgress(out)], **RUN)
    last = plain(out).splitlines()[-2:]
    assert re.match(r"\r?epoch 2/2 ━+ 6/6 0:\d\d:\d\d left 0:00:00", last[0])
    assert re.match(r"reward 0\.5, 0\.5  return 1  entropy 0\.6\d+  [\d,]+ tokens/s", last[1])
    assert written(out).rstrip().endswith(f"{ESCAPE}[?25h")


@pytest.mark.parametrize(("options", "shown"), [({}, "epoch 2/2 ━+ 6/6"), ({"max_updates": 5}, "update ━+ 5/5")])
def test_a_resumed_run_shows_how_far_the_whole_run_is(tmp_path, options, shown):
    fields = RUN | {"num_turns": 1, "external_transition": None} | options
    stopped = train(tmp_path, callbacks=[TeamCheckpoint(every_n_batches=1)], **fields | {"max_updates": 1})
    assert stopped.module.batches in (1, 2)  # in the middle of an epoch
    out = console(terminal=True)
    made = trainer(tmp_path, rank, callbacks=[TeamCheckpoint(every_n_batches=1), RunProgress(out)], **fields)
    made.train(resume_from_checkpoint="last")
    assert re.search(shown, plain(out).splitlines()[-2])


@pytest.mark.parametrize("phase", PHASES)
def test_the_line_below_the_bar_says_what_is_being_done(phase):
    module = SimpleNamespace(phases=SimpleNamespace(current=phase))
    assert str(status({"reward": [0.25, 1.0], "tokens/s": 1234.5}, module)).split("  ") == [
        "reward 0.25, 1", "1,234 tokens/s", PHASES[phase]
    ]  # fmt: skip
    module.phases.current = None
    assert str(status({"reward": [0.25]}, module)).strip() == "reward 0.25"


def test_what_was_skipped_is_left_out_of_the_line():
    root = Node(0, {}, [], rewards=[1.0, None], returns=[None, None])
    assert batch_values({"trees": [root], "samples": [], "reports": [(0, {"entropy": 2.0}), (1, {})]}) == {
        "reward": [1.0], "entropy": 2.0
    }  # fmt: skip
    root.rewards = [None, None]
    assert batch_values({"trees": [root]}) == {}


def test_where_nothing_was_scored_there_is_no_signal(tmp_path):
    assert in_words({"reward": [0.25], "entropy": None, "tokens/s": 3.0}) == "reward 0.25  no signal  3 tokens/s"
    root = Node(0, {}, [], rewards=[1.0, 1.0], returns=[1.0, 1.0])
    assert "entropy" not in batch_values({"trees": [root], "reports": []})  # no update was made
    for terminal in (False, True):
        out = console(terminal=terminal)
        train(tmp_path, lambda *texts: [1.0] * len(texts[0]), rows=["go"] * 2, callbacks=[RunProgress(out)])
        assert re.search(r"reward 1  return 1  no signal  [\d,]+ tokens/s", plain(out))
        assert "entropy" not in plain(out)


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("100", 100)])
def test_a_table_elsewhere_than_in_a_terminal_has_one_width_and_no_trailing_blanks(
    tmp_path, monkeypatch, capsys, columns, width
):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    train(tmp_path, rows=["go " * 40], callbacks=[CompletionTable()])
    lines = capsys.readouterr().err.splitlines()
    (rule,) = [line for line in lines if set(line.strip()) == {"─"}]
    assert width - 2 <= len(rule) <= width
    assert all(len(line) <= width and line == line.rstrip() for line in lines if not line.startswith("epoch"))


def test_the_cursor_is_given_back_after_an_error(tmp_path):
    out = console(terminal=True)

    def reward(first, second):
        raise OSError

    with pytest.raises(Exception, match="OSError"):
        train(tmp_path, reward, callbacks=[RunProgress(out)])
    assert written(out).rstrip().endswith(f"{ESCAPE}[?25h")


def test_a_bar_that_is_listed_replaces_it_and_none_is_shown_if_none_is_wanted(tmp_path, capfd):
    train(tmp_path, callbacks=[TQDMProgressBar(refresh_rate=0)])
    assert "batch 1" not in capfd.readouterr().err
    train(tmp_path)
    assert "batch 1" in capfd.readouterr().err
    train(tmp_path, enable_progress_bar=False)
    assert capfd.readouterr() == ("", "")


# header


@pytest.mark.parametrize("fields", [{}, {"joint_mode": "cross"}, {"num_turns": 3}])
def test_a_tree_that_is_played_out_has_as_many_joint_actions_as_the_header_says(tmp_path, fields):
    made = train(tmp_path, **RUN | {"rows": ["go"], "num_train_epochs": 1} | fields)
    assert most_joint_actions(made.args) == made.module.env_step


def test_the_header_counts_what_is_trained_and_what_it_takes(tmp_path):
    made = trainer(tmp_path, agents=llama_team())
    made.module.configure_model()
    team = made.module.team
    weights = sum(weight.numel() for agent in range(2) for weight in team.model(agent).parameters())
    assert count_weights(team) == (weights, weights)
    held, learning = memory(team)
    assert learning == 12 * weights
    assert 4 * weights <= held < 4.01 * weights
    lines = header(team, made.args, made.module.agent_names())
    assert len(lines) == 4
    assert lines[0] == "agents      2 x LlamaForCausalLM (2 models in memory); magrpo"
    assert f"{weights:,} trainable of {weights:,}" in lines[1]
    assert "at most 2 joint actions a prompt (1 turn, 2 answers, aligned)" in lines[2]


def test_what_adapters_share_counts_once(tmp_path):
    whole = llama_model(len(word_tokenizer()))
    word_tokenizer().save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "base")
    made = MAGRPOTrainer(
        agent_model=str(tmp_path / "base"), model_config={"lora": {"r": 2}}, reward_func=rank,
        args=MAGRPOConfig(num_turns=1),
    )  # fmt: skip
    made.module.configure_model()
    trainable, total = count_weights(made.module.team)
    base = sum(weight.numel() for weight in whole.parameters())
    assert total == base + trainable
    assert 0 < trainable < base


# what came of it


def test_the_summary_compares_means_over_a_tenth_of_the_rows_that_have_a_value(tmp_path):
    rewards = [1.0, 3.0, *[2.0] * 2, *[100.0] * 32, *[6.0] * 2, 5.0, 7.0]
    lines = ["step,turn_1/reward_mean,eval/x", *(f"{step},{reward}," for step, reward in enumerate(rewards)), "40,,1"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    assert (
        summary(tmp_path) == f"turn 1 reward: 2 -> 6 (first and last 4 of 40 rows of metrics)\nrun folder: {tmp_path}"
    )
    assert first_and_last([{"a": "1"}, {"a": ""}, {"a": "2"}], ["a"]) == (1, 2, 1, 2)
    assert first_and_last([{"a": ""}], ["a"]) is None
    assert summary(tmp_path / "nothing") == f"run folder: {tmp_path / 'nothing'}"


def test_the_table_has_every_turn_and_what_agents_do(tmp_path, capsys):
    made = train(tmp_path, **RUN)
    out = console(terminal=True)
    print_summary(made.run_folder, out)
    shown = re.sub(rf"{ESCAPE}\[[\d;]*m", "", written(out))
    for line in ("turn 1 reward", "turn 2 reward", "turn 1 return", "entropy, nats a token", "tokens an answer"):
        assert line in shown
    assert "means over the first and last 3 of 6 rows of metrics" in shown
    assert capsys.readouterr().out.splitlines()[-1] == f"run folder: {made.run_folder}"
    assert summary_table(made.run_folder / "metrics.csv").row_count == 7


@pytest.mark.parametrize(
    ("reward", "nothing"), [(lambda *texts: [1.0] * len(texts[0]), True), (rank, False)], ids=["constant", "rank"]
)
def test_it_is_said_if_nothing_was_learned_and_one_row_has_one_value(tmp_path, reward, nothing):
    made = train(tmp_path, reward, rows=["go"], enable_progress_bar=False)
    lines = summary(made.run_folder).splitlines()
    assert lines[0] == f"turn 1 reward: {1 if nothing else 0.5} (1 row of metrics)"
    assert (NOTHING_LEARNED in lines) is nothing
    out = console(terminal=True)
    print_summary(made.run_folder, out)
    shown = " ".join(plain(out).split())
    assert "1 row of metrics" in shown
    assert "change" not in shown
    assert ("nothing was learned" in shown) is nothing


# from Python


def test_a_run_from_python_says_where_it_is_and_what_was_trained(tmp_path, capsys):
    made = train(tmp_path, rows=["go", "on"])
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[:4]] == ["agents", "parameters", "rollouts", "memory"]
    assert out[4] == f"run folder  {made.run_folder}; 2 rows, 1 epoch"
    assert out[-3] == "turn 1 reward: 0.5 -> 0.5 (first and last 1 of 2 rows of metrics)"
    assert out[-2].startswith("100% of the answers were cut at max_new_tokens")
    assert out[-1] == f"run folder: {made.run_folder}"


def test_the_configuration_of_a_run_from_python_runs_again_from_the_command_line(tmp_path, monkeypatch):
    word_tokenizer().save_pretrained(tmp_path / "base")
    llama_model(len(word_tokenizer())).save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "c"}\n')
    monkeypatch.chdir(tmp_path)
    made = MAGRPOTrainer(
        agent_model="base", reward_func=rank, train_dataset={"path": "rows.jsonl"}, accelerator="cpu",
        args=MAGRPOConfig(num_turns=1, num_train_epochs=1, max_new_tokens=2, logging_steps=1, seed=3),
    )  # fmt: skip
    made.train()
    assert fit.main(["--config", str(made.run_folder / "config.yaml")]) == 0
    first, second = ((tmp_path / f"runs/run_000{n}/metrics.csv").read_text() for n in (1, 2))
    assert first == second


def test_what_has_no_name_is_said_to_have_none(tmp_path):
    made = train(tmp_path, lambda first, second: rank(first), rows=["go", "on"])
    text = (made.run_folder / "config.yaml").read_text()
    saved = yaml.safe_load(text)
    assert text.startswith("# Written by MAGRPOTrainer. What stands in <...> has no name")
    assert saved["model"]["reward_func"] == "<lambda>"
    assert saved["model"]["agents"] == ["<TableModel>", "<TableModel>"]
    assert saved["data"]["train"] == "<list of 2 rows>"
    assert saved["model"]["config"]["num_generations"] == 2


def rows_file(folder, rewards, cut):
    columns = "step,turn_1/reward_mean,agent_0/truncated_fraction"
    lines = [columns, *(f"{step},{reward},{cut}" for step, reward in enumerate(rewards))]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("rows", "said"),
    [(1, "1 row"), (2, "first and last 1 of 2"), (5, "first and last 2 of 5"), (14, "first and last 3 of 14")],
)
def test_ends_of_a_short_run_are_a_few_rows(tmp_path, rows, said):
    text = summary(rows_file(tmp_path, [1.0] * rows, 0.5))
    assert said in text
    assert "cut" not in text


def test_that_nearly_all_answers_were_cut_is_said(tmp_path):
    text = summary(rows_file(tmp_path, [1.0, 2.0], 0.95))
    assert "95% of the answers were cut at max_new_tokens: with more room they may end by themselves\n" in text
