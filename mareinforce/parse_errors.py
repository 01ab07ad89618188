"""What the command line's parser complains about, said in a sentence that names the key and the way out."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Iterable, Sequence

from mareinforce.agents.lora import LoRA
from mareinforce.errors import ConfigError, MareinforceError, UserCodeError, did_you_mean
from mareinforce.eval_protocol import EvalProtocol

NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"

_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<argument>\S+)")
_NOT_ACCEPTED = (
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"Subcommand '(?P<group>)[^']+' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"(?P<group>)Option '(?P<key>[^']+)' is not accepted"),
)
_NO_SWITCH = (
    re.compile(r"argument --(?P<key>[\w-]+)/.*: invalid _boolean_type value: '(?P<value>[^']*)'"),
    re.compile(r"Value not boolean: (?P<value>.*?)\.?$"),
)
"""Of the keys that are switches (`--wandb`, `--no-wandb`)."""
_LINKED = (
    re.compile(r"argument .*?(?P<source>model\.\w+)\S* --> (?P<key>[\w.]+): "),
    re.compile(r'Linked "(?P<key>[^"]+)" must be given via "(?P<source>[\w.]+)'),
)
_INNER_OPTION = re.compile(r"Option '(?P<key>[^']+)' is not accepted")
_INNER_VALUE = re.compile(r'Parser key "(?P<key>\w+)":\s*(?P<rest>Expected an? .*?Got value: [^\n;]*)', re.DOTALL)
_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s*(?P<rest>.*)", re.DOTALL)
_NO_ATTRIBUTE = re.compile(r"module '(?P<module>[^']+)' has no attribute '(?P<name>[^']+)'")
_INNER_KEYS = {
    "model.lora": [field.name for field in dataclasses.fields(LoRA)],
    "eval": [field.name for field in dataclasses.fields(EvalProtocol)],
}
"""Keys below keys that may also be something else, which the parser does not list."""
_BAD_VALUE = re.compile(r'Parser key "(?P<key>[^"]+)":\s*(?P<rest>.*)', re.DOTALL)
_GIVEN = re.compile(r"(?:Got value|Given value): (?P<value>.*)")
_EXPECTED = re.compile(r"Expected an? (?P<what>.+?)(?:\. Got value.*)?")
_UNION = re.compile(r"Errors:\n(?P<errors>.*?)\n\s*Given value type:", re.DOTALL)
_WORDS = {
    "<class 'int'>": "a whole number, written without point or exponent",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'list'>": "a list",
    "<class 'dict'>": "key: value pairs",
    "<class 'NoneType'>": "null",
}


def explained(message: str, known: Sequence[str]) -> MareinforceError:
    """Turn the parser's message into an error that says what to do. ``known``: every dotted key there is."""
    text = message.strip()
    if found := _UNRECOGNIZED.match(text):
        argument = found["argument"]
        if not argument.startswith("--") and argument.endswith((".yaml", ".yml")):
            return ConfigError(f"{argument!r} on the command line belongs to no key. Did you mean --config {argument}?")
        if not argument.startswith("--"):
            return ConfigError(f"{argument!r} on the command line belongs to no key: write --KEY VALUE.")
        return _no_such_key(argument[2:].split("=")[0], known)
    for pattern in _NOT_ACCEPTED:
        if found := pattern.match(text):
            return _no_such_key(".".join(part for part in (found["group"], found["key"]) if part), known)
    for pattern in _NO_SWITCH:
        if found := pattern.search(text):
            key, value = found.groupdict().get("key") or "wandb (or wandb_save_models)", found["value"]
            upload = (
                " For a run that is uploaded later, set WANDB_MODE=offline beside it." if value == "offline" else ""
            )
            return ConfigError(f"{key}={value}: must be true or false.{upload}")
    for pattern in _LINKED:
        if found := pattern.match(text):
            return ConfigError(f"{found['key']} is set by {found['source']}: give {found['source']} instead.")
    if found := _BAD_VALUE.match(text):
        return _bad_value(found["key"], found["rest"])
    if text.startswith("Unexpected config"):
        return ConfigError("the configuration must be `key: value` lines; this file holds something else, or nothing.")
    return ConfigError(_one_line(text))


def not_made(error: ValueError) -> MareinforceError:
    """What went wrong where the parser could not make an object of a configured class: what its constructor raised."""
    root: BaseException = error
    while root.__cause__ is not None and not isinstance(root, MareinforceError):
        root = root.__cause__
    if isinstance(root, MareinforceError):
        return root
    found = _CLASS.search(str(error))
    what = found["path"] if found else "an object of the configuration"
    failed = UserCodeError(f"{what} could not be made: {type(root).__name__}: {_one_line(str(root))}")
    failed.__cause__ = root
    return failed


def nearest_key(key: str, known: Iterable[str]) -> str:
    """`` Did you mean ...?``: the same name elsewhere, else a similar one beside it, else a similar whole key."""
    known = list(known)
    parent, leaf = _split(key)
    if elsewhere := [other for other in known if _split(other)[1] == leaf]:
        return f" Did you mean {elsewhere[0]!r}?"
    beside = [other for other in known if _split(other)[0] == parent]
    names = {f" Did you mean {_split(other)[1]!r}?": f" Did you mean {other!r}?" for other in beside}
    if beside:
        return names.get(did_you_mean(leaf, [_split(other)[1] for other in beside]), "")
    return did_you_mean(key, {*known, *(_split(other)[0] for other in known)})


def _split(key: str) -> tuple[str, str]:
    parent, _, leaf = key.rpartition(".")
    return parent, leaf


def _no_such_key(key: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"{key}: there is no such key.{nearest_key(key, known)}")


def _bad_value(key: str, rest: str) -> MareinforceError:
    if key in _INNER_KEYS and (found := _INNER_OPTION.search(rest)):
        return ConfigError(f"{key}.{found['key']}: there is no such key; {key} has {', '.join(_INNER_KEYS[key])}.")
    if key in _INNER_KEYS and (found := _INNER_VALUE.search(rest)):
        return _bad_value(f"{key}.{found['key']}", found["rest"])
    if key in _INNER_KEYS and (written := _GIVEN.findall(rest)):
        listed = ", or a list of them, one an agent (null: none)" if key == "model.lora" else ""
        example = ", ".join(_INNER_KEYS[key][:3])
        return ConfigError(f"{key}={written[-1].strip()}: must be key: value pairs ({example} ...){listed}.")
    if found := _CLASS.search(rest):
        return _bad_class(key, found["path"], found["rest"])
    values = _GIVEN.findall(rest)
    given = values[-1].strip() if values else None
    union = _UNION.search(rest)
    reasons = _bullets(union["errors"]) if union else [rest.split(" Got value")[0].strip().rstrip(".")]
    expected = [found["what"] for reason in reasons if (found := _EXPECTED.fullmatch(reason))]
    others = [_one_line(reason) for reason in reasons if not _EXPECTED.fullmatch(reason)]
    if given is None or others:
        said = " ".join(dict.fromkeys(others)) or _one_line(rest)
        if given is None:
            return ConfigError(f"{key}: {said}")
        return _failed_import(key, given) or ConfigError(f"{key}={given}: {_callable_words(said)}")
    if "<class 'str'>" in expected and re.fullmatch(NUMBER, given):
        return ConfigError(f"{key}={given}: this is read as a number where text is wanted; put quotes around it.")
    if key == "trainer.callbacks" and re.fullmatch(r"\w+", given):
        homes = ("mareinforce.callbacks", "lightning.pytorch.callbacks")
        names = [name for home in homes for name in importlib.import_module(home).__all__]
        return ConfigError(f"{key}={given}: there is no such callback.{did_you_mean(given, names)}")
    wanted = [_WORDS.get(what) or _choices(what) for what in dict.fromkeys(expected)]
    choices = [word for what in wanted for word in what.split(" | ")]
    return ConfigError(f"{key}={given}: must be {' or '.join(wanted)}.{did_you_mean(given, choices)}")


def _bad_class(key: str, path: str, rest: str) -> MareinforceError:
    """What is wrong with a `class_path` and its `init_args`."""
    if found := _INNER_OPTION.search(rest):
        has = _arguments(path)
        near = did_you_mean(found["key"], has)
        return ConfigError(f"{key}: {path} has no argument {found['key']!r}; it has {', '.join(has)}.{near}")
    if found := _INNER_VALUE.search(rest):
        return _bad_value(f"{key}: {path} {found['key']}", found["rest"])
    if found := _NO_ATTRIBUTE.search(rest):
        near = did_you_mean(found["name"], dir(importlib.import_module(found["module"])))
        return ConfigError(f"{key}: {found['module']} has no {found['name']!r}.{near}")
    said = _one_line(rest.split("Not a valid subclass")[0])
    return _failed_import(key, path) or ConfigError(f"{key}: {path}: {said}")


def _arguments(path: str) -> list[str]:
    """Names of the arguments of the class that a dotted path leads to."""
    module, _, name = path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def _failed_import(key: str, dotted: str) -> UserCodeError | None:
    """The user's own error, if the module of a dotted path is there but raises when it is imported."""
    module = dotted.rpartition(".")[0]
    if not re.fullmatch(r"\w+(\.\w+)*", module):
        return None
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and module.startswith(error.name or " "):
            return None
        failed = UserCodeError(f"{key}={dotted}: importing {module} raised {type(error).__name__}: {error}.")
        failed.__cause__ = error
        return failed
    return None


def _callable_words(reason: str) -> str:
    found = re.match(r"Type collections\.abc\.Callable\S* .*?expects a function or a callable class: (.*)", reason)
    if found is None:
        return reason
    said = f"this function cannot be found: {found[1]}"
    if missing := _NO_ATTRIBUTE.search(reason):
        return f"{said}{did_you_mean(missing['name'], dir(importlib.import_module(missing['module'])))}"
    if "No module named" in reason:
        return f"{said.rstrip('.')}. Modules are also looked for in the current folder, {os.getcwd()}."
    return said


def _bullets(text: str) -> list[str]:
    return [bullet.strip() for bullet in re.split(r"^ {4}- ", text, flags=re.MULTILINE) if bullet.strip()]


def _choices(expected: str) -> str:
    found = re.fullmatch(r"typing\.Literal\[(.*)\]", expected)
    if expected.startswith("dot import path string"):
        return "a dotted path such as my_task.reward"
    return found[1].replace("'", "").replace(", ", " | ") if found else expected


def _one_line(text: str) -> str:
    joined = re.sub(r"\s*\n\s*(- )?", "; ", text.strip())
    return joined.replace(":;", ":").rstrip(".") + "."
