"""Encoding of an entry, which is one line of a store's file. It holds a decision or removes one:

    {"crc32":"5d1f00aa","name":"fprop x=64x64x56x56 ... sampling=auto","decision":{...}}
    {"crc32":"0c9be2f1","name":"fprop x=64x64x56x56 ... sampling=auto","decision":null}

The checksum covers the rest of the line and the environment's digest. It detects a line that was
torn or edited, and a line from the file of another environment.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress

from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines.problem_json import problem_from_text
from cudnn_autotune.store import compact
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

MOST_BYTES = 1900
"""The size to which a line with a decision is reduced; see ``compact``."""
_BEGIN, _NAME, _DECISION = b'{"crc32":"', b'","name":', b',"decision":'
_CHECKED = len(_BEGIN) + 8
_NAMED = _CHECKED + len(_NAME)
_POLICY = " benchmark_limit="
_SAMPLING = " sampling="
_READ = "_read"
_DETERMINISTIC = " deterministic"


def names(key: str) -> tuple[bytes, bytes]:
    """Returns the names of a key's two entries in a file, as quoted JSON: of a decision that was
    measured without determinism, and of one that was measured with it."""
    problem, _, policy = key.partition(_POLICY)
    return _quoted(key), _quoted(f"{problem}{_DETERMINISTIC}{_POLICY}{policy}")


def name_of(decision: Decision) -> bytes:
    """Returns the name of the decision's entry."""
    plain, deterministic = names(decision.key)
    return deterministic if decision.problem.deterministic else plain


def key_of(name: bytes) -> str:
    """Returns the ``Decision.key`` to which the entry of this name belongs."""
    text = name[1:-1].decode(errors="replace")
    if b"\\" in name:
        with suppress(ValueError):
            text = Node(json.loads(name), "name").text()
    problem, separator, policy = text.partition(_POLICY)
    return problem.removesuffix(_DETERMINISTIC) + separator + policy


def problem_of(key: str) -> str:
    """Returns the part of a ``Decision.key`` that describes the problem."""
    return key.partition(_POLICY)[0]


def _quoted(text: str) -> bytes:
    return json.dumps(text).encode()


def seed(environment: Environment) -> int:
    """Returns the initial value for the checksums of an environment's lines."""
    return zlib.crc32(environment.digest.encode())


def encode(decision: Decision, environment: Environment) -> bytes:
    """Returns the line of a decision, without a line feed. Raises ValueError for a number that is
    not finite."""
    if is_as_read(decision, environment):
        return decision.__dict__[_READ][1]
    name = name_of(decision)
    room = MOST_BYTES - _NAMED - len(name) - len(_DECISION) - len("}\n")
    return sealed(name, compact.encode(decision, room).encode(), environment)


def removal(name: bytes, environment: Environment) -> bytes:
    """Returns the line that removes the decision of this name."""
    return sealed(name, b"null", environment)


def sealed(name: bytes, value: bytes, environment: Environment) -> bytes:
    """Returns the line for a name and a decision's JSON, with its checksum."""
    rest = b"%s%s%s%s}" % (_NAME, name, _DECISION, value)
    return b"%s%08x%s" % (_BEGIN, zlib.crc32(rest, seed(environment)), rest)


def name_in(line: bytes, seed: int) -> bytes | None:
    """Returns the name in a line without line feed, or None if its checksum is wrong; ``seed`` is
    that of its environment."""
    checksum = b"%08x" % zlib.crc32(line[_CHECKED:], seed)
    if line[len(_BEGIN) : _CHECKED] != checksum or not line.startswith(_BEGIN):
        return None
    end = line.find(b'"', _NAMED + 1) + 1
    return line[_NAMED:end] if end and line.startswith(_NAME + b'"', _CHECKED) else None


def is_removal(line: bytes) -> bool:
    """Returns whether a line removes a decision. The line must have passed :func:`name_in`."""
    return line.endswith(b"%snull}" % _DECISION)


def decode(line: bytes, environment: Environment) -> Decision:
    """Returns the decision in a line that passed :func:`name_in`.

    Raises:
        ValueError: The line holds no decision, or one of another name.
    """
    decision = _decoded(line)
    decision.__dict__[_READ] = (environment, line)
    if not line.startswith(name_of(decision), _NAMED):
        raise ValueError("the entry's name is not that of its problem")
    return decision


def _decoded(line: bytes) -> Decision:
    try:
        tree = json.loads(line)
        described, _, policy = Node(tree["name"], "name").text().partition(_POLICY)
        limit, _, sampling = policy.partition(_SAMPLING)
        problem = described.removesuffix(_DETERMINISTIC)
        return compact.decode(
            tree["decision"],
            problem_from_text(problem, deterministic=described != problem),
            sampling,
            int(limit),
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is not an entry: {error!r}") from error


def is_as_read(decision: Decision, environment: Environment) -> bool:
    """Returns whether the decision was read from a line of this environment, which it then
    remembers, so that writing it again changes nothing."""
    return _READ in decision.__dict__ and decision.__dict__[_READ][0] == environment
