"""One line of a store's file: a decision, or that there is none any more.

    {"crc32":"5d1f00aa","name":"fprop x=64x64x56x56 ... sampling=auto","decision":{...}}
    {"crc32":"0c9be2f1","name":"fprop x=64x64x56x56 ... sampling=auto","decision":null}

The checksum is that of what follows it, and of the environment's digest: a line that was torn, or
that is of another environment, is recognised by it.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress

from cudnn_autotune.engines.problem_json import problem_from_text
from cudnn_autotune.store import compact, version1
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

MOST_BYTES = 1900
"""Of a line with a decision; see ``compact``."""
_BEGIN, _NAME, _DECISION = b'{"crc32":"', b'","name":', b',"decision":'
_CHECKED = len(_BEGIN) + 8
_NAMED = _CHECKED + len(_NAME)
_POLICY = " benchmark_limit="
_SAMPLING = " sampling="
_READ = "_read"
_DETERMINISTIC = " deterministic"


def names(key: str) -> tuple[bytes, bytes]:
    """The two entries that a key (``Decision.key``) may have, as the file names them: that measured
    without determinism, and that measured with it."""
    problem, _, policy = key.partition(_POLICY)
    return _quoted(key), _quoted(f"{problem}{_DETERMINISTIC}{_POLICY}{policy}")


def name_of(decision: Decision) -> bytes:
    """The name of its entry."""
    plain, deterministic = names(decision.key)
    return deterministic if decision.problem.deterministic else plain


def key_of(name: bytes) -> str:
    """The key of an entry, by its name."""
    text = name[1:-1].decode(errors="replace")
    if b"\\" in name:
        with suppress(ValueError):
            text = json.loads(name)
    problem, separator, policy = text.partition(_POLICY)
    return problem.removesuffix(_DETERMINISTIC) + separator + policy


def problem_of(key: str) -> str:
    """The problem's text in a key."""
    return key.partition(_POLICY)[0]


def _quoted(text: str) -> bytes:
    return json.dumps(text).encode()


def seed(environment: Environment) -> int:
    """What the checksums of an environment's lines begin with."""
    return zlib.crc32(environment.digest.encode())


def encode(decision: Decision, environment: Environment) -> bytes:
    """The line of a decision, without its end. ValueError: a number that JSON has not."""
    if is_as_read(decision, environment):
        return decision.__dict__[_READ][1]
    name = name_of(decision)
    room = MOST_BYTES - _NAMED - len(name) - len(_DECISION) - len("}\n")
    return sealed(name, compact.encode(decision, room).encode(), environment)


def removal(name: bytes, environment: Environment) -> bytes:
    """The line which says that there is no decision of this name any more."""
    return sealed(name, b"null", environment)


def sealed(name: bytes, value: bytes, environment: Environment) -> bytes:
    """A line, with its checksum, of a name and a decision's JSON."""
    rest = b"%s%s%s%s}" % (_NAME, name, _DECISION, value)
    return b"%s%08x%s" % (_BEGIN, zlib.crc32(rest, seed(environment)), rest)


def name_in(line: bytes, seed: int) -> bytes | None:
    """The name in a line; None where the line is damaged, or not of the environment."""
    checksum = b"%08x" % zlib.crc32(line[_CHECKED:], seed)
    if line[len(_BEGIN) : _CHECKED] != checksum or not line.startswith(_BEGIN):
        return None
    end = line.find(b'"', _NAMED + 1) + 1
    return line[_NAMED:end] if end and line.startswith(_NAME + b'"', _CHECKED) else None


def is_removal(line: bytes) -> bool:
    """Of a line that is not damaged."""
    return line.endswith(b"%snull}" % _DECISION)


def decode(line: bytes, environment: Environment) -> Decision:
    """The decision in a line that is not damaged, or in one of version 1.

    Raises:
        ValueError: saying what is wrong with it; also where its name is not that of its problem.
    """
    if line.startswith(b'"'):
        decision, begin = version1.decode(line), 0
    else:
        decision, begin = _decoded(line), _NAMED
        decision.__dict__[_READ] = (environment, line)
    if not line.startswith(name_of(decision), begin):
        raise ValueError("the entry is named as one of another problem")
    return decision


def _decoded(line: bytes) -> Decision:
    try:
        tree = json.loads(line)
        described, _, policy = tree["name"].partition(_POLICY)
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
        raise ValueError(f"it is no entry: {error!r}") from error


def is_as_read(decision: Decision, environment: Environment) -> bool:
    """Whether it was read from a line of this environment: it then remembers the line, and nothing
    of it is lost when it is written."""
    return _READ in decision.__dict__ and decision.__dict__[_READ][0] == environment


def of_this_version(line: bytes, environment: Environment) -> bytes:
    """A line that says the same in the present version; ValueError where its decision cannot be
    read."""
    return encode(decode(line, environment), environment) if line.startswith(b'"') else line
