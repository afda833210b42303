"""The HTML report, as text: complete, well formed, by itself, and safe against what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.store.stored import (
    H200,
    decisions,
    fill,
    layer,
    refused,
    simulation,
    slower,
    succeeded,
)

from cudnn_autotune.cli.report import page
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning.gain import against_pytorch, own_path_entry, total

VOID = {"meta", "br", "input", "link", "img", "hr", "wbr", "base"}
# In SVG an element may close itself.
SVG = {"line", "circle", "path", "text", "svg"}


class Page(HTMLParser):
    """Complains of tags that do not match; keeps attributes, and the text of each kind of tag."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        assert tag in SVG, tag
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(self.texts["main"][0].split())


def rendered(kept: Sequence[Decision] = (), environment: Environment = H200) -> str:
    return page.render(kept or decisions(), environment, source="h200.json")


@pytest.fixture(scope="module")
def html() -> str:
    return rendered()


@pytest.fixture(scope="module")
def parsed(html: str) -> Page:
    return Page(html)


def test_well_formed(html: str, parsed: Page) -> None:
    assert html.lstrip().startswith("<!DOCTYPE html>")
    assert parsed.of("html")[0]["lang"] == "en"
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert len(parsed.of("details")) == len(decisions())
    assert parsed.texts["h1"] == ["1.02× the speed of PyTorch"]


def test_nothing_from_elsewhere(html: str, parsed: Page) -> None:
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "action", "style"), (tag, name)
            assert name != "href" or str(value).startswith("#d"), value
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html
    policy = next(str(m["content"]) for m in parsed.of("meta") if "http-equiv" in m)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    links = [str(a["href"])[1:] for a in parsed.of("a")]
    assert set(links) <= {attributes.get("id") for attributes in parsed.of("div")}
    assert len(links) == len(decisions())


def test_every_decision_is_told(parsed: Page) -> None:
    for decision in decisions():
        assert decision.key in parsed.texts["code"]
        assert decision.chosen.candidate.text in parsed.texts["code"]
        assert f"Rule: {decision.selection.evidence.rule}." in parsed.texts["li"]
        for remark in decision.selection.evidence.remarks:
            assert remark in parsed.texts["li"]
        alone = decision.chosen.sustained_ms
        assert alone is None or f"{alone:.4g}"[:5] in parsed.text
    assert "NVIDIA H200" in parsed.texts["dd"]
    assert "9.19.0" in parsed.texts["dd"]
    assert "580.159.04" in parsed.texts["dd"]
    assert "relative error 0.0002" in parsed.texts["dd"]
    assert "sw_power_cap" in parsed.texts["dd"]


def test_against_pytorch() -> None:
    resnet = decisions()[1]
    found = against_pytorch(resnet)
    theirs = own_path_entry(resnet.selection)
    assert theirs.candidate.text == found.text != "aten"
    assert found.is_sustained
    assert found.ours_ms == resnet.chosen.sustained_ms
    assert found.pytorch_ms == theirs.sustained_ms
    assert found.ratio == pytest.approx(found.pytorch_ms / found.ours_ms)
    assert found.is_sure
    # One of the tied is slower by chance, for all that is known.
    evidence = resnet.selection.evidence
    evidence = replace(evidence, tied=(*evidence.tied, found.text))
    tied = replace(resnet, selection=replace(resnet.selection, evidence=evidence))
    assert against_pytorch(tied).least == 1.0
    assert not against_pytorch(tied).is_sure
    # PyTorch's own kernel, which was chosen.
    depthwise = against_pytorch(decisions()[4])
    assert depthwise.text == "aten"
    assert depthwise.ratio == 1.0
    assert depthwise.is_sure
    # By a mode that does not time there is nothing to say.
    assert against_pytorch(simulation("quiet", layer(), mode="heuristic")) is None


def test_what_intervals_do_not_tell_apart_is_said() -> None:
    vgg = decisions()[2]
    evidence = replace(vgg.selection.evidence, tied=(vgg.selection.winner.candidate.text,))

    def as_wide(by: float) -> Decision:
        """Of short batches only, with intervals of all that are ``by`` wide, relatively, to each
        side."""
        ranking = tuple(
            replace(
                e,
                low_ms=(e.time_ms or 0.0) / by,
                high_ms=(e.time_ms or 0.0) * by,
                sustained_ms=None,
            )
            for e in vgg.selection.ranking
        )
        return replace(vgg, selection=replace(vgg.selection, ranking=ranking, evidence=evidence))

    narrow, wide = as_wide(1.001), as_wide(1.5)
    sure, unsure = against_pytorch(narrow), against_pytorch(wide)
    assert not sure.is_sustained
    assert sure.text not in evidence.tied
    assert sure.ratio == unsure.ratio > 1
    assert unsure.least == pytest.approx(sure.ratio / 1.5**2)
    assert unsure.most == pytest.approx(sure.ratio * 1.5**2)
    assert sure.is_sure
    assert not unsure.is_sure
    assert total([narrow]).is_sure
    assert not total([wide]).is_sure
    assert f"≈{sure.ratio:.2f}×" in Page(rendered([wide])).texts["td"]
    assert f"{sure.ratio:.2f}×" in Page(rendered([narrow])).texts["td"]
    said = "in short batches; the two could not be told apart."
    assert said in rendered([wide])
    assert said not in rendered([narrow])
    # A sum is sure as soon as what is unsure in it cannot turn it.
    many = [slower(narrow, 100.0), wide]
    assert total(many).is_sure


def test_times_of_two_kinds_are_not_compared() -> None:
    resnet = decisions()[1]
    theirs = own_path_entry(resnet.selection)
    ranking = tuple(
        replace(entry, sustained_ms=None) if entry is theirs else entry
        for entry in resnet.selection.ranking
    )
    found = against_pytorch(replace(resnet, selection=replace(resnet.selection, ranking=ranking)))
    assert not found.is_sustained
    assert (found.ours_ms, found.pytorch_ms) == (resnet.chosen.time_ms, theirs.time_ms)


def test_totals() -> None:
    found = total(decisions())
    compared = [c for d in decisions() if (c := against_pytorch(d)) is not None]
    assert found.decisions == found.timed == 6
    assert found.compared == len(compared)
    assert found.ours_ms == pytest.approx(sum(c.ours_ms for c in compared))
    assert found.pytorch_ms == pytest.approx(sum(c.pytorch_ms for c in compared))
    assert found.ratio == pytest.approx(found.pytorch_ms / found.ours_ms)
    assert found.ratio > 1
    # Everything takes twice as long, with PyTorch, too.
    twice = total([slower(d, 2.0) for d in decisions()])
    assert twice.time_ms == pytest.approx(2 * found.time_ms)
    assert twice.ratio == pytest.approx(found.ratio)
    parsed = Page(rendered())
    assert f"{found.pytorch_ms:.3f}" in parsed.text
    assert f"{found.ratio:.2f}×" in parsed.text
    ops = [text for text in parsed.texts["th"] if text in ("fprop", "dgrad", "wgrad", "all")]
    assert ops == ["fprop", "dgrad", "wgrad", "all"]


HOSTILE = (
    "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}\x1b[2J"
)


def test_hostile_names_stay_text() -> None:
    made = decisions()[1]
    first, *others = made.selection.ranking
    candidate = replace(
        first.candidate,
        text=HOSTILE,
        numerical_notes=(HOSTILE,),
        behavior_notes=(HOSTILE,),
        heuristic_mode="A",
    )
    ranking = (
        replace(first, candidate=candidate),
        *(replace(entry, eliminated=HOSTILE) for entry in others),
    )
    evidence = replace(
        made.selection.evidence,
        rule=HOSTILE,
        tied=(HOSTILE, HOSTILE + "2"),
        remarks=(HOSTILE,),
        throttle_reasons=(HOSTILE,),
    )
    hostile = replace(
        made,
        policy=Policy(HOSTILE.replace("\x1b", "").replace('"', "")),
        selection=replace(made.selection, ranking=ranking, evidence=evidence),
        provenance=replace(made.provenance, driver=HOSTILE, torch=HOSTILE, cudnn_autotune="\ud800"),
    )
    environment = replace(H200, gpu=HOSTILE, cudnn=HOSTILE, mig_profile=HOSTILE)
    html = page.render([hostile], environment, source=HOSTILE, selected=HOSTILE)
    html.encode()
    assert "\x1b" not in html
    parsed = Page(html)
    plain = Page(rendered([made]))
    # The same tags as ever, and the names are all there as text.
    assert len(parsed.of("script")) == len(parsed.of("style")) == 1
    assert {tag for tag, _ in parsed.tags} == {tag for tag, _ in plain.tags}
    assert all(set(a) <= {"href"} for a in parsed.of("a"))
    assert HOSTILE.replace("\x1b", "\ufffd") in parsed.texts["dd"]
    assert "49" not in html.replace("{{ 7*7 }}", "").partition("<main>")[0].partition("<body>")[2]


def test_command(tmp_path: Path) -> None:
    file = fill(tmp_path / "store")
    out = tmp_path / "folder" / "page.html"
    text = succeeded("report", out, "--store", file)
    assert f"6 decisions -> {out}" in text
    parsed = Page(out.read_text(encoding="utf-8"))
    assert parsed.texts["h1"] == ["1.02× the speed of PyTorch"]
    assert parsed.texts["p"][-1].endswith(f", from {file.name}.")
    again = ("report", out, "--store", file, "--op", "dgrad")
    assert f"'FILE.html': {out} is there already; --force replaces it" in refused(*again)
    assert Page(out.read_text(encoding="utf-8")).texts["h1"] == ["1.02× the speed of PyTorch"]
    succeeded(*again, "--force")
    parsed = Page(out.read_text(encoding="utf-8"))
    assert parsed.texts["h1"] == ["1.03× the speed of PyTorch"]
    assert "cudnn_autotune report: 2 decisions" in parsed.texts["p"]
    assert "op dgrad" in parsed.texts["dd"]


def test_a_sum_weighs_each_problem_by_its_calls() -> None:
    one, other = decisions()[1], decisions()[2]
    found = [against_pytorch(d) for d in (one, other)]
    calls = {one.problem: 3, other.problem: 2}
    weighed = total([one, other], calls)
    theirs = sum(n * c.pytorch_ms for n, c in zip((3, 2), found, strict=True) if c)
    ours = sum(n * c.ours_ms for n, c in zip((3, 2), found, strict=True) if c)
    assert weighed.pytorch_ms == pytest.approx(theirs)
    assert weighed.ratio == pytest.approx(theirs / ours)
    assert (weighed.calls, weighed.compared_calls, weighed.compared) == (5, 5, 2)
    # A problem without a decision is a call that is not counted as a gain.
    missing = total([one], calls)
    assert (missing.calls, missing.compared_calls) == (5, 3)
    assert missing.line("Net", is_step=True, took_s=4.13).startswith("Net: ")
    assert missing.line(is_step=True).endswith(
        "2 more not counted, since PyTorch's time is not known"
    )
