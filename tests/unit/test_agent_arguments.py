"""A team's arguments are refused before anything loads, each with the value, the rule and the way out."""

import pytest

from mareinforce.agents import loading
from mareinforce.agents.team import Team, check_agents
from mareinforce.errors import AgentError, ConfigError


@pytest.fixture(autouse=True)
def _nothing_loads(monkeypatch):
    def loads(*_, **__):
        raise AssertionError("a model was loaded before its arguments were checked")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", loads)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", loads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no agents: set agent_model"),
        ({"agent_model": "tiny-story", "agents": ["tiny-story"]}, "agent_model and agents are both given"),
        ({"agent_model": 3}, "agent_model=int: must be a name"),
        ({"agents": []}, r"agents=\[\]: must be a list"),
        ({"agents": "tiny-story"}, "agents='tiny-story': must be a list"),
        ({"agents": ["tiny-story", 3]}, r"agents\[1\] is a int"),
        ({"agents": ["tiny-story"] * 3, "num_agents": 2}, "num_agents=2 but agents lists 3"),
        ({"agent_model": "tiny-story", "num_agents": 0}, "num_agents=0: must be a whole number of at least 1"),
        ({"agent_model": "tiny-story", "num_agents": True}, "num_agents=True"),
        ({"agent_model": "tiny-story", "tokenizer": 5}, "tokenizer=int: must be a tokenizer"),
        ({"agent_model": "tiny-story", "tokenizer": ["x"]}, "tokenizer lists 1 for 2 agents"),
        ({"agent_model": "tiny-story", "tokenizer": ["x", 5]}, r"tokenizer\[1\] is a int"),
        ({"agent_model": "tiny-story", "model_config": "bf16"}, "model_config='bf16': must map names to values"),
        (
            {"agent_model": "tiny-story", "model_config": {"dtpye": 1}},
            r"model_config.dtpye: unknown.*Did you mean 'dtype'",
        ),
        (
            {"agent_model": "tiny-story", "model_config": {"lora": {"rank": 4}}},
            r"lora.rank: unknown, must be one of r",
        ),
        ({"agent_model": "tiny-story", "lora": {"r": 4}, "model_config": {"lora": {"r": 4}}}, "are both given"),
        ({"agent_model": "tiny-story", "lora": [{"r": 4}]}, "lora lists 1 for 2 agents"),
        ({"agent_model": "tiny-story", "lora": {"r": 0}}, "lora.r=0: must be a whole number of at least 1"),
        ({"agent_model": "tiny-story", "lora": {"lora_alpha": -1}}, "lora.lora_alpha=-1: must be a number above 0"),
        (
            {"agent_model": "tiny-story", "lora": {"lora_dropout": 1.0}},
            r"lora.lora_dropout=1.0: must be a number",
        ),
        ({"agent_model": "tiny-story", "lora": {"bias": "all"}}, "lora.bias='all': biases belong to the base"),
        ({"agent_model": "tiny-story", "lora": {"target_modules": []}}, r"lora.target_modules=\[\]: must be a name"),
        ({"agent_model": "tiny-story", "lora": {"init_lora_weights": "pissa"}}, "must begin as its base"),
        ({"agent_model": "tiny-story", "lora": 8}, "lora=8: must map names to values"),
        (
            {"agent_model": "tiny-story", "trainable": [True]},
            r"trainable=\[True\]: must be true or false",
        ),
        ({"agent_model": "tiny-story", "trainable": [False, False]}, "at least one agent must learn"),
        (
            {"agent_model": "tiny-story", "share_policy": True, "trainable": [True, False]},
            "their weights all learn",
        ),
        ({"agent_model": "tiny-story", "share_policy": True, "lora": [{}, {}]}, "speak with one adapter"),
        ({"agents": ["tiny-story", "other/one"], "share_policy": True}, "agents 0 and 1 are different models"),
        ({"agent_model": "tiny-story", "share_policy": "yes"}, "share_policy='yes': must be true or false"),
        ({"agent_model": "tiny-story", "model_config": {"revision": 3}}, "model_config.revision=3: must be text"),
        (
            {"agent_model": "tiny-story", "model_config": {"revision": ["a"]}},
            "revision lists 1 for 2 agents",
        ),
        ({"agent_model": "tiny-story", "model_config": {"trust_remote_code": "yes"}}, "must be true or false"),
        ({"agent_model": "tiny-story", "model_config": {"special_tokens": "<a>"}}, "must be a list of tokens, or map"),
        ({"agent_model": "tiny-story", "model_config": {"dtype": "int8"}}, "model_config.dtype=int8: must be one of"),
        (
            {"agent_model": "tiny-story", "model_config": {"dtype": "bfloat16"}},
            "model_config.dtype=bfloat16: trainable weights must be float32: at these learning rates",
        ),
    ],
)
def test_what_cannot_be_meant(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_agents(**arguments)
    with pytest.raises(ConfigError, match=message):
        Team.build(**arguments, max_new_tokens=8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "./no/such/folder",
            r"agent 0: the model folder './no/such/folder' does not exist \(embedded models: tiny-story",
        ),
        ("/no/such/folder", "does not exist"),
        ("a/b/c", "does not exist"),
        ("", "does not exist"),
        ("tiny-stroy", r"agent 0: there is no model 'tiny-stroy'\. Did you mean 'tiny-story'\?"),
        ("smollm2-135m-instrct", "Did you mean 'smollm2-135m-instruct'"),
    ],
)
def test_models_that_are_not_there(name, message):
    with pytest.raises(AgentError, match=message):
        check_agents(agent_model=name)


def test_loaded_models_need_a_tokenizer_and_keep_their_attention(gpt2, llama, words):
    with pytest.raises(AgentError, match="agent 1 is a loaded model without a tokenizer: pass tokenizer"):
        check_agents(agents=["tiny-story", gpt2])
    with pytest.raises(AgentError, match="agent 1 is a loaded model without a tokenizer"):
        check_agents(agents=[gpt2, llama], tokenizer=[words, None])
    with pytest.raises(ConfigError, match=r"model_config\.attn_implementation: a loaded model keeps its own"):
        check_agents(agents=[gpt2], tokenizer=words, model_config={"attn_implementation": "eager"})
    assert check_agents(agents=[gpt2, llama], tokenizer=words) == 2


def test_what_is_meant_gives_the_number_of_agents():
    assert check_agents(agent_model="tiny-story") == 2
    assert check_agents(agent_model="owner/model", num_agents=3, tokenizer="owner/other") == 3
    assert check_agents(agents=["tiny-story"], model_config={"dtype": "float32", "attn_implementation": "sdpa"}) == 1
