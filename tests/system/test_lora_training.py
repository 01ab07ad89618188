"""Teams of adapters, shared policies and frozen partners, as they train."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from mareinforce import learner as learner_module
from mareinforce.agents.node_scoring import score_nodes
from mareinforce.agents.team import Team
from mareinforce.errors import UserCodeError
from mareinforce.optim import apply_gradient, compute_gradient, sample_loss
from tests.lora import IDS, LORA, adapter_of, base_weights, is_untouched, logits, same, save_base, stir, wrap
from tests.models import EOS, gpt2_model, llama_model, word_tokenizer
from tests.system.runs import Recorder, column, metrics, rank, trainer, unchanged, weights

ROWS = ("a", "b c", "d")
FIELDS = {"max_new_tokens": 4, "num_generations": 4, "agent_learning_rate": 0.01, "rows": ROWS}


def lora_run(folder, base, count=2, lora=LORA, reward=rank, **options):
    return trainer(folder, reward, ([base] * count, None), **{**FIELDS, "model_config": {"lora": lora}, **options})


@pytest.fixture
def base(tmp_path):
    return save_base(tmp_path / "base")


@pytest.fixture
def spy(monkeypatch):
    """Calls a function before and after every update of a policy: (team, agent, made so far)."""
    seen = []

    def watched(team, optimizer, update):
        before = [watch(team) for watch in seen]
        apply_gradient(team, optimizer, update)
        agent = next(iter(update.losses))
        for watch, was in zip(seen, before, strict=True):
            watch.changes.append((agent, [not same(a, b) for a, b in zip(was, watch(team), strict=True)]))

    monkeypatch.setattr(learner_module, "apply_gradient", watched)
    return seen


class Watch:
    """What `look` finds of each agent, and which agents' it changed at every update."""

    def __init__(self, look):
        self.look, self.changes = look, []

    def __call__(self, team):
        return [self.look(team, agent) for agent in range(len(team))]


def moments(made):
    """Everything in the optimizer of an agent's policy, by name."""

    def look(team, agent):
        found = {}
        for policy, optimizer in zip(team.policies, made.module.optimizers(), strict=True):
            if agent in policy.agents:
                for index, state in enumerate(optimizer.optimizer.state.values()):
                    found |= {f"{index} {name}": value.clone() for name, value in state.items()}
        return found

    return look


@pytest.mark.parametrize("lora", [LORA, [LORA, {"r": 3}]], ids=["equal", "different ranks"])
def test_an_update_of_one_adapter_leaves_the_other_and_the_base_alone(tmp_path, base, spy, lora):
    made = lora_run(tmp_path, base, lora=lora)
    spy += [Watch(adapter_of), Watch(moments(made))]
    made.train()
    each = [(0, [True, False]), (1, [False, True])]
    assert [watch.changes for watch in spy] == [each * 3, each * 3]
    team = made.module.team
    assert len(team.networks) == 1
    assert is_untouched(team.network(0), base)
    with torch.no_grad():
        next(iter(team.network(0).parameters())).add_(1e-7)
    assert not is_untouched(team.network(0), base)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("share", [False, True])
def test_the_reference_of_an_adapter_is_the_untouched_base_at_every_step(tmp_path, monkeypatch, model, share):
    words = word_tokenizer()
    base = save_base(tmp_path / "base", {"llama": llama_model, "gpt2": gpt2_model}[model](len(words)))
    untouched, plain, seen = AutoModelForCausalLM.from_pretrained(base), Team.score_reference, []

    def watched(team, agent, nodes, temperature):
        found = plain(team, agent, nodes, temperature)
        with torch.no_grad(), team.speaking(agent) as speaking:
            policies, bases = score_nodes(speaking, nodes, temperature), score_nodes(untouched, nodes, temperature)
        for reference, policy, same_base in zip(found, policies, bases, strict=True):
            assert not reference.logprobs.requires_grad
            equal = torch.equal(reference.logprobs, same_base.logprobs)
            seen.append((equal, torch.equal(policy.logprobs, reference.logprobs)))
        return found

    monkeypatch.setattr(Team, "score_reference", watched)
    made = lora_run(tmp_path, base, reference_kl_enabled=True, reference_kl_coef=0.05, share_policy=share)
    made.train()
    assert seen == [(True, True)] * 2 + [(True, False)] * 4  # the policy is its base before the first update only
    for agent in range(2):
        kl = column(made, f"agent_{agent}/turn_1/reference_kl_mean")
        assert kl[0] == 0.0
        assert min(kl[1:]) > 0.0
    assert len(made.module.team.frozen) == 0
    assert is_untouched(made.module.team.network(0), base)


def test_adapters_are_on_after_a_reward_that_fails(tmp_path, base):
    calls = []

    def reward(*texts):
        calls.append(texts)
        if len(calls) == 3:
            raise ValueError("no more")
        return rank(*texts)

    made = lora_run(tmp_path, base, reward=reward, reference_kl_enabled=True, reference_kl_coef=0.05)
    with pytest.raises(UserCodeError, match="no more"):
        made.train()
    team, untouched = made.module.team, AutoModelForCausalLM.from_pretrained(base)
    assert made.module.updates == [2, 2]
    for agent in range(2):
        # what speaks now, without a switch
        assert not torch.equal(
            team.network(agent)(torch.tensor([[5, 6]])).logits, untouched(torch.tensor([[5, 6]])).logits
        )
        assert not torch.equal(logits(team, agent), untouched(torch.tensor([[5, 6, 7, 8]])).logits)
    assert not torch.equal(logits(team, 0), logits(team, 1))


@pytest.mark.parametrize("fails", [False, True])
def test_wrapped_models_answer_as_themselves_afterwards_and_can_be_trained_again(tmp_path, fails):
    words = word_tokenizer()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    models = [wrap(llama_model(len(words)), config) for _ in range(2)]
    for seed, model in enumerate(models):
        stir(model, seed)
    for reference in (False, True, True):
        before = [model(IDS).logits.detach() for model in models]
        made = trainer(tmp_path, rank, (models, words), **FIELDS, reference_kl_enabled=reference, eval_dataset=["a"])
        made.evaluate(1)
        assert [torch.equal(model(IDS).logits, was) for model, was in zip(models, before, strict=True)] == [True, True]
        made.train()
        team = made.module.team
        assert len(team.networks) == 1
        said = [model(IDS).logits.detach() for model in models]
        assert not any(torch.equal(one, other) for one, other in zip(said, before, strict=True))
        assert all(torch.equal(logits(team, agent), said[agent]) for agent in range(2))
        team.rest()
    if fails:
        answers = iter([[0.0, 1.0, 2.0, 3.0]])
        made = trainer(tmp_path, lambda *_: next(answers), (models, words), **FIELDS)
        with pytest.raises(UserCodeError):
            made.train()
        assert made.module.updates == [1, 1]
        said = [model(IDS).logits.detach() for model in models]
        assert [torch.equal(logits(made.module.team, agent), said[agent]) for agent in range(2)] == [True, True]


class TestDropout:
    """Both the model's and the adapter's are 0.5, and everything is left in training mode."""

    @pytest.fixture
    def made(self, tmp_path):
        base = save_base(tmp_path / "base", gpt2_model(len(word_tokenizer()), dropout=0.5))
        made = lora_run(tmp_path, base, lora={**LORA, "lora_dropout": 0.5}, reference_kl_enabled=True, rows=ROWS[:2])
        made.module.configure_model()
        made.module.train()
        return made

    def test_kl_is_exactly_0_before_the_first_update(self, made):
        made.train()
        kl = column(made, "turn_1/reference_kl_mean")
        assert kl[0] == 0.0 < kl[1]
        assert column(made, "agent_0/sampling_gap")[1] < 1e-4  # scored as it was sampled
        assert made.module.team.network(0).training

    def test_scoring_twice_is_identical_and_flags_come_back(self, made):
        team = made.module.team
        stir(team.network(0))
        team.network(0).base_model.model.transformer.h[1].eval()
        flags = [module.training for module in team.modules()]
        asked = 0, torch.tensor([4, 5]), [torch.tensor([6, 7, 8]), torch.tensor([9, EOS])], 1.0
        first, second = team.score(*asked), team.score(*asked)
        assert torch.equal(first.logprobs, second.logprobs)
        assert [module.training for module in team.modules()] == flags
        with team.speaking(0) as model:  # left on, two forwards differ
            assert not torch.equal(model(torch.tensor([[4, 5]])).logits, model(torch.tensor([[4, 5]])).logits)


def test_tokenizers_with_and_without_a_pad_token_each_read_only_their_own_ids(tmp_path):
    words, others = word_tokenizer(pad=None), word_tokenizer(["go", "stop", "a", "b", "c", "<end>"])
    others.eos_token = "<end>"
    models = [gpt2_model(len(words)), llama_model(len(others), eos=others.eos_token_id)]
    words.save_pretrained(tmp_path / "words")
    on_disk = {path.name: path.read_bytes() for path in (tmp_path / "words").iterdir()}
    reward = Recorder()
    made = trainer(tmp_path, reward, (models, [words, others]), **{**FIELDS, "rows": ["a"]})
    made.module.configure_model()
    assert [made.module.team.end_ids(agent)[0] for agent in range(2)] == [EOS, others.convert_tokens_to_ids("<end>")]
    before = weights(models)
    made.train()
    assert unchanged(before, models) == [False, False]
    vocabularies = [set(tokenizer.get_vocab()) for tokenizer in (words, others)]
    said = [{word for text in texts for word in text.split()} for texts in reward.texts[0]]
    assert said[0] <= vocabularies[0]
    assert said[1] <= vocabularies[1]
    assert said[0] - vocabularies[1]
    assert words.pad_token is None
    words.save_pretrained(tmp_path / "words")
    assert on_disk == {path.name: path.read_bytes() for path in (tmp_path / "words").iterdir()}


class TestSharedPolicy:
    def test_one_optimizer_steps_once_on_the_sum_over_agents_of_the_mean_over_nodes(self, tmp_path, base, monkeypatch):
        seen = []

        def watched(team, optimizer, batch, config, policy_version, *rest):
            (policy,) = team.policies
            named = list(team.weights(policy).values())
            losses = {
                agent: [sample_loss(team, s, config, 0)[0] for s in batch if s.agent == agent] for agent in (0, 1)
            }
            total = sum(sum(own) / len(own) for own in losses.values())
            wanted = torch.autograd.grad(total, named)
            update = compute_gradient(team, optimizer, batch, config, policy_version, *rest)
            found = [[weight.grad.clone() for weight in named]]
            seen.append((len(batch), wanted, found, sum(update.losses.values()), float(total.detach())))
            return update

        monkeypatch.setattr(learner_module, "compute_gradient", watched)
        made = lora_run(tmp_path, base, share_policy=True, rollout_buffer_size=3)
        made.train()
        ((size, wanted, found, loss, total),) = seen
        assert size == 6  # three nodes, two agents
        assert len(found) == 1
        for one, other in zip(found[0], wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        halved = [
            torch.allclose(one, other / 2, atol=1e-5, rtol=1e-5) for one, other in zip(found[0], wanted, strict=True)
        ]
        assert not all(halved)  # what the mean over all six would have been
        assert loss == pytest.approx(total, abs=1e-5)
        assert made.module.updates == [1, 1]

    def test_both_agents_speak_with_what_was_learned(self, tmp_path, base):
        made = lora_run(tmp_path, base, share_policy=True)
        made.train()
        team = made.module.team
        assert len(made.module.configure_optimizers()) == len(team.policies) == len(team.networks) == 1
        assert team.seats[0] == team.seats[1]
        assert torch.equal(logits(team, 0), logits(team, 1))
        assert not torch.equal(
            logits(team, 0), AutoModelForCausalLM.from_pretrained(base)(torch.tensor([[5, 6, 7, 8]])).logits
        )
        steps = {int(state["step"]) for state in made.module.optimizers().optimizer.state.values()}
        assert steps == {3} == set(made.module.updates)


@pytest.mark.parametrize("lora", [None, LORA, [LORA, None]], ids=["whole", "adapters", "one adapter"])
def test_a_frozen_partner_speaks_and_stays_as_it_is(tmp_path, base, lora):
    reward = Recorder()
    made = lora_run(tmp_path, base, lora=lora, reward=reward, trainable=[True, False])
    made.module.configure_model()
    team = made.module.team
    before = [logits(team, agent) for agent in range(2)]
    state = {name: weight.clone() for name, weight in team.network(1).state_dict().items()}
    made.train()
    assert [torch.equal(logits(team, agent), before[agent]) for agent in range(2)] == [False, True]
    trained = set(team.weights(team.policies[0]))
    for name, weight in team.network(1).state_dict().items():
        changed = f"networks.{team.seats[1].network}.{name}" in trained
        assert torch.equal(weight, state[name]) != changed
    assert len(made.module.configure_optimizers()) == 1
    assert made.module.updates == [3, 0]
    assert len({text for texts in reward.texts for text in texts[1]}) > 1
    assert not any(name.startswith("agent_1/loss") for name in metrics(made)[0])


def test_optimizers_hold_adapters_and_nothing_else(tmp_path, base):
    made = lora_run(tmp_path, base, lora=[LORA, {"r": 3}])
    made.module.configure_model()
    team = made.module.team
    counts = []
    for optimizer, policy in zip(made.module.configure_optimizers(), team.policies, strict=True):
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        named = {id(weight): name for name, weight in team.named_parameters()}
        assert {named[one].split(".")[-2] for one in held} == {f"agent_{policy.agents[0]}"}
        assert all("lora_" in named[one] for one in held)
        counts.append(len(held))
    assert counts == [28, 28]  # two matrices for each of seven layers in two blocks
    assert len(list(team.parameters())) == sum(counts) + len(base_weights(team.network(0)))
