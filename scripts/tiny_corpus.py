"""The corpus of the tiny pair: "spec comment -> Python code" files and half of the standard library.

A synthetic file starts with a comment that states names and values, and goes on with code that copies them, so
that a small target learns to be sure of most tokens while a drafter has something to look up. Choices that the
comment does not state (variable names, optional helpers, phrasing) keep real branches in the text.
"""

import ast
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

NOUNS = """account actor agent alarm album anchor archive arrow badge basket batch beacon binder block board bottle
bridge broker bucket budget buffer bundle cabin cable camera canvas carrier castle center chain channel chapter circle
client clock cluster coin column command counter courier crate cursor damper depot device diary dialog digest domain
driver editor engine entry event factory feature feed fence field filter finder folder forest frame garden gateway
gauge graph grid group handle harbor header helper hinge index island item journal kernel ladder lantern layer ledger
lens letter level limiter link list loader locker logger market marker matrix menu meter mirror module monitor needle
network node notice number object orbit order packet page panel parcel parser patch path pattern payment phase pilot
pipe pixel planet player plugin pocket point policy portal printer probe profile proxy pulse puzzle queue radar range
reader record region relay report request ribbon river robot rocket router runner sample scanner schema score screen
search section segment sensor series server session shadow shape shelf signal socket source spider stage station
status storage stream studio switch symbol table tablet target task temple ticket timer token tower tracker trail
train travel tunnel turbine vault vector vendor vessel viewer voucher wallet warden widget window worker zone""".split()
VERBS = """accept adjust append apply attach balance build cancel check clean clear close collect commit compare
compile convert copy count create decode deliver detect drain draw drop encode expand export extract fetch filter
flush format gather handle import insert inspect install load lock match measure merge migrate move notify open pack
parse pause pick plan print process prune publish pull push read rebuild record reduce refresh reject release reload
remove rename render repair replay report reset resize resolve restore resume retry reverse rotate scan schedule
select send shift sign sort split start stop store submit sync track transfer trim update upload validate verify
watch wrap write""".split()
ADJECTIVES = """active big blue bold brief bright calm clean clear cold compact cyclic dark deep dense direct double
dry early easy empty even exact fast final fine fixed flat free fresh full global gold gray green hard heavy hidden
idle inner internal joint large last late lazy light live local long loose low main major manual minor mixed modern
narrow native nested new next noisy north odd old open outer pale partial plain primary prime private public pure
quick quiet rapid rare raw ready red remote rich round safe secure shared sharp short silent simple single slow small
smooth soft solid south sparse stable static steady still strict strong tall thin total upper urgent valid warm weak
white wide wild young""".split()
EXTENSIONS = "bin cfg csv dat ini json log md out toml txt xml yaml".split()

Field = tuple[str, str, str]  # name, type name, value as a Python literal


def _camel(*words: str) -> str:
    return "".join(word.capitalize() for word in words)


def _value(rng: random.Random, kind: str) -> str:
    match kind:
        case "int":
            return str(rng.choice([rng.randrange(10), rng.randrange(100), rng.randrange(1000, 9999)]))
        case "float":
            return f"{rng.randrange(1, 10)}.{rng.choice([0, 25, 5, 75])}"
        case "bool":
            return rng.choice(["True", "False"])
        case _:
            return f'"{rng.choice(ADJECTIVES + NOUNS)}"'


def _fields(rng: random.Random, low: int, high: int) -> list[Field]:
    names: list[str] = []
    count = rng.randint(low, high)
    while len(names) < count:
        name = rng.choice([rng.choice(NOUNS), f"{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}"])
        if name not in names:
            names.append(name)
    kinds = [rng.choice(["int", "int", "str", "str", "float", "bool"]) for _ in names]
    return [(name, kind, _value(rng, kind)) for name, kind in zip(names, kinds, strict=True)]


def _field_lines(fields: list[Field], label: str) -> list[str]:
    return [f"# {label}: {name} {kind} {value}" for name, kind, value in fields]


def _class_file(rng: random.Random) -> str:
    words = (rng.choice(ADJECTIVES), rng.choice(NOUNS))
    name, fields = _camel(*words), _fields(rng, 2, 5)
    lines = [f"# class {name}", *_field_lines(fields, "field"), ""]
    lines += [f"class {name}:", "    def __init__(self, " + ", ".join(f"{n}={v}" for n, _, v in fields) + "):"]
    lines += [f"        self.{n} = {n}" for n, _, _ in fields]
    for n, kind, _ in fields:
        if rng.random() < 0.3:
            lines += ["", "    @property", f"    def current_{n}(self):", f"        return self.{n}"]
        else:
            lines += ["", f"    def get_{n}(self):", f"        return self.{n}"]
        if kind == "int" and rng.random() < 0.5:
            lines += ["", f"    def add_{n}(self, amount):", f"        self.{n} += amount", f"        return self.{n}"]
    lines += ["", "    def __repr__(self):"]
    lines += [f'        return f"{name}(' + ", ".join(f"{n}={{self.{n}!r}}" for n, _, _ in fields) + ')"']
    if rng.random() < 0.5:
        lines += ["", "    def to_dict(self):", "        return {"]
        lines += [f'            "{n}": self.{n},' for n, _, _ in fields] + ["        }"]
    variable = rng.choice([words[1], "item", "obj"])
    lines += ["", "", f"def test_{'_'.join(words)}():", f"    {variable} = {name}()"]
    lines += [f"    assert {variable}.{n} == {v}" for n, _, v in fields]
    return "\n".join(lines) + "\n"


def _cli_file(rng: random.Random) -> str:
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    fields = [f for f in _fields(rng, 2, 5) if f[1] != "bool"] or [("count", "int", "3")]
    helps = [f"{rng.choice(ADJECTIVES)} {n.replace('_', ' ')} to {verb}" for n, _, _ in fields]
    lines = [f"# command {verb}-{noun}"]
    lines += [f"# option: --{n.replace('_', '-')} {k} {v} ({h})" for (n, k, v), h in zip(fields, helps, strict=True)]
    lines += ["", "import argparse", "", "", f"def {verb}_{noun}({', '.join(n for n, _, _ in fields)}):"]
    lines += [f'    print("{n}", {n})' for n, _, _ in fields]
    lines += ["    return " + rng.choice(["0", f"{fields[0][0]}", "True"])]
    lines += ["", "", "def main():", f'    parser = argparse.ArgumentParser(prog="{verb}-{noun}")']
    for (n, k, v), h in zip(fields, helps, strict=True):
        flag = n.replace("_", "-")
        lines += [f'    parser.add_argument("--{flag}", type={k}, default={v}, help="{h}")']
    lines += ["    args = parser.parse_args()"]
    lines += [f"    {verb}_{noun}(" + ", ".join(f"args.{n}" for n, _, _ in fields) + ")"]
    lines += ["", "", 'if __name__ == "__main__":', "    main()"]
    return "\n".join(lines) + "\n"


def _dispatch_file(rng: random.Random) -> str:
    noun, verbs = rng.choice(NOUNS), rng.sample(VERBS, rng.randint(3, 6))
    argument = rng.choice(["value", "name", "request"])
    lines = [f"# dispatch {noun}", *(f"# action: {v}" for v in verbs), ""]
    for v in verbs:
        body = rng.choice([f'return "{v} " + {argument}', f'return ("{v}", {argument})', f"return {argument}"])
        lines += ["", f"def {v}_{noun}({argument}):", f"    {body}", ""]
    table = f"{noun.upper()}_ACTIONS"
    lines += ["", f"{table} = {{", *(f'    "{v}": {v}_{noun},' for v in verbs), "}", "", ""]
    lines += [f"def run_{noun}(action, {argument}):", f"    if action not in {table}:"]
    lines += [f'        raise KeyError(f"unknown {noun} action: {{action}}")']
    lines += [f"    return {table}[action]({argument})"]
    if rng.random() < 0.5:
        lines += ["", "", f"def test_{noun}_actions():", *(f'    assert "{v}" in {table}' for v in verbs)]
    return "\n".join(lines) + "\n"


def _config_file(rng: random.Random) -> str:
    noun, fields = rng.choice(NOUNS), _fields(rng, 3, 6)
    loader = rng.choice(["json", "tomllib"])
    file_name = f"{noun}.{rng.choice(EXTENSIONS)}"
    lines = [f"# config {noun} from {file_name}", *_field_lines(fields, "key"), "", f"import {loader}", ""]
    lines += [f"{noun.upper()}_DEFAULTS = {{", *(f'    "{n}": {v},' for n, _, v in fields), "}", "", ""]
    lines += [f'def load_{noun}(path="{file_name}"):', '    with open(path, "rb") as file:']
    lines += [f"        loaded = {loader}.load(file)", f"    config = dict({noun.upper()}_DEFAULTS)"]
    for n, kind, _ in fields:
        lines += [f'    if "{n}" in loaded:', f'        config["{n}"] = {kind}(loaded["{n}"])']
    lines += ["    return config"]
    if rng.random() < 0.5:
        lines += ["", "", f"def test_{noun}_defaults():"]
        lines += [f'    assert {noun.upper()}_DEFAULTS["{n}"] == {v}' for n, _, v in fields]
    return "\n".join(lines) + "\n"


def _enum_file(rng: random.Random) -> str:
    noun, members = rng.choice(NOUNS), rng.sample(ADJECTIVES, rng.randint(3, 6))
    start, name = rng.choice([0, 1, 10]), _camel(noun, rng.choice(["kind", "state", "mode"]))
    lines = [f"# enum {name}", *(f"# member: {m} {start + i}" for i, m in enumerate(members)), ""]
    lines += ["from enum import IntEnum", "", "", f"class {name}(IntEnum):"]
    lines += [f"    {m.upper()} = {start + i}" for i, m in enumerate(members)]
    lines += ["", "", f"def parse_{noun}(text):"]
    for m in members:
        lines += [f'    if text == "{m}":', f"        return {name}.{m.upper()}"]
    lines += [rng.choice([f'    raise ValueError(f"not a {noun}: {{text}}")', "    return None"])]
    lines += ["", "", f"def test_parse_{noun}():"]
    lines += [f'    assert parse_{noun}("{m}") == {start + i}' for i, m in enumerate(members)]
    return "\n".join(lines) + "\n"


def _record_file(rng: random.Random) -> str:
    noun, fields = rng.choice(NOUNS), _fields(rng, 2, 5)
    name = _camel(noun, "record")
    lines = [f"# record {name}", *_field_lines(fields, "column"), "", "from dataclasses import dataclass", "", ""]
    lines += ["@dataclass", f"class {name}:", *(f"    {n}: {k} = {v}" for n, k, v in fields), "", ""]
    lines += [f"def create_{noun}_table(connection):", "    connection.execute("]
    lines += [f'        "CREATE TABLE {noun} (' + ", ".join(n for n, _, _ in fields) + ')"', "    )", "", ""]
    lines += [f"def insert_{noun}(connection, {noun}):", "    connection.execute("]
    lines += [f'        "INSERT INTO {noun} VALUES (' + ", ".join("?" for _ in fields) + ')",']
    lines += ["        (" + ", ".join(f"{noun}.{n}" for n, _, _ in fields) + ",),", "    )"]
    if rng.random() < 0.5:
        lines += ["", "", f"def validate_{noun}({noun}):"]
        for n, k, _ in fields:
            lines += [f"    if not isinstance({noun}.{n}, {k}):", f'        raise TypeError("{n} must be {k}")']
    return "\n".join(lines) + "\n"


_KINDS: list[Callable[[random.Random], str]] = [
    _class_file,
    _cli_file,
    _dispatch_file,
    _config_file,
    _enum_file,
    _record_file,
]


def synthetic_files(seed: int, count: int) -> list[str]:
    """``count`` files, a function of ``seed`` alone; kinds take turns so that any prefix is balanced."""
    rng = random.Random(seed)
    return [_KINDS[i % len(_KINDS)](rng) for i in range(count)]


def prompt_of(text: str) -> str:
    """The part of a synthetic file that a model continues: the comment that specifies it and the first word of code.

    Not the bare comment: what ends in a line break is split into other tokens than the same text in a file.
    """
    return re.match(r"(?:#.*\n)+\n+@?\w+", text)[0]


def title_of(text: str) -> str:
    """The first line of a synthetic file and the start of the second: what it specifies is left to the model."""
    return re.match(r"#.*\n#.*?:", text)[0]


def standard_library_files() -> Iterator[str]:
    """Every second module of the CPython standard library in use, without comments and docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo", "encodings"}
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    for path in sorted(paths)[::2]:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if documented and ast.get_docstring(node, clean=False):
                node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        yield ast.unparse(tree) + "\n"
