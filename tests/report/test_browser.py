"""Reports of real runs in a real browser: nothing is missing, nothing complains, all widths fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import REQUIRED, Page, chromium, find_chromium
from demo_run import disco_ds, fastclip, two_ranks, workplace
from PIL import Image

from disco_ds.distributed import World
from disco_ds.report import finish_run, record_start

WIDTHS = (390, 820, 1440)
# Elements beyond the right edge, but for those inside something that scrolls on its own.
STICKING_OUT = """
[...document.querySelectorAll('main *')]
  .filter(e => !e.closest('.scroll, pre, svg'))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
  .map(e => e.outerHTML.slice(0, 80))
"""
# Texts whose colour stands out from what is behind them by less than WCAG's 4.5 : 1.
TOO_FAINT = """
(() => {
  const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length && c[3] !== 0) return c;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll('main *')].filter(
    e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
  return texts.filter(e => {
    const style = getComputedStyle(e);
    const ink = rgb(e.namespaceURI.endsWith('svg') ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 4.5;
  }).map(e => e.outerHTML.slice(0, 80));
})()
"""
LIGHT, DARK = (246, 247, 249), (18, 22, 27)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def evaluated(run: Path) -> Path:
    output = run / "evaluations" / "afterwards.json"
    if not output.exists():
        disco_ds("evaluate", str(run), "--data", "data/demo", "-o", str(output))
    return run


@pytest.fixture(scope="module")
def report(page: Page) -> Path:
    """Of the demo on two ranks."""
    run = evaluated(two_ranks())
    disco_ds("report", str(run))
    return run / "report.html"


@pytest.fixture(scope="module")
def comparison(page: Page) -> Path:
    """Of that run and one with another loss."""
    runs = [str(evaluated(run)) for run in (two_ranks(), fastclip())]
    disco_ds("report", *runs, "-o", "both.html")
    return workplace() / "both.html"


@pytest.fixture(scope="module")
def failed(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("failed")
    record_start(run, World(), strategy="zero")
    path = finish_run(run, World(), "failed", "step 1: " + "a_very_long_word_without_a_break" * 9)
    assert path is not None
    return path


@pytest.mark.parametrize("which", ["report", "comparison", "failed"])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_looks_right(
    page: Page,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    which: str,
    width: int,
    dark: bool,
) -> None:
    path = request.getfixturevalue(which)
    page.show(path, width=width, dark=dark)
    assert page.errors() == []
    assert page.requests() == [path.resolve().as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(STICKING_OUT) == []
    assert page.evaluate(TOO_FAINT) == []
    assert (
        page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length")
        == 0
    )
    shot = Image.open(page.screenshot(tmp_path / "shot.png")).convert("RGB")
    assert shot.width == width
    assert shot.getpixel((1, 1)) == (DARK if dark else LIGHT)
    assert len(shot.quantize(64).getcolors() or []) > 4


def test_report_of_the_demo(page: Page, report: Path) -> None:
    page.show(report, width=1440)
    text = page.evaluate("document.body.innerText")
    for part in (
        "disco-demo-rn",
        "40 of 40",
        "Loss",
        "Temperature",
        "Learning rate",
        "Throughput",
        "Memory",
        "Ranks",
        "Zero-shot skin tone",
        "image \u2192 text R@10",
        "what is taken for what",
        "Captions for a picture: worst",
        "Seen",
    ):
        assert part in text
    assert page.evaluate("document.images.length") >= 16
    assert page.evaluate("document.querySelectorAll('svg path').length") >= 8
    sizes = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.clientHeight)")
    assert min(sizes) > 100


def test_comparison_of_two_runs(page: Page, comparison: Path) -> None:
    page.show(comparison, width=1440)
    text = page.evaluate("document.body.innerText")
    for part in ("two", "fastclip v3", "Settings that differ", "loss.name", "\u03b3"):
        assert part in text
    assert page.evaluate("document.querySelectorAll('.delta').length") >= 4
    assert page.evaluate(
        "getComputedStyle(document.querySelector('path.s0')).stroke"
        " != getComputedStyle(document.querySelector('path.s1')).stroke"
    )


def test_pointing_at_a_chart_shows_its_values(page: Page, report: Path) -> None:
    page.show(report, width=1440)
    x, y = page.evaluate(
        "(() => { const s = document.querySelector('svg'); s.scrollIntoView({block: 'center'});"
        " const b = s.getBoundingClientRect(); return [b.x + b.width * 0.97, b.y + 60] })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = page.evaluate("document.getElementById('tip').innerText")
    assert tip.startswith("step 40\ntwo: ")
    assert "chance 4.159: 4.159" in tip
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    assert page.evaluate("document.getElementById('tip').hidden")


def test_the_file_stands_alone(report: Path, tmp_path: Path, page: Page) -> None:
    """Copied somewhere else, it is the same page."""
    copy = tmp_path / "copy.html"
    copy.write_bytes(report.read_bytes())
    assert "http" not in copy.read_text().replace("http://www.w3.org/2000/svg", "")
    page.show(copy, width=390)
    assert page.errors() == []
    assert page.requests() == [copy.resolve().as_uri()]


def test_ci_fails_without_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere its tests are skipped, saying why."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install"):
        find_chromium()
    monkeypatch.delenv(REQUIRED)
    with pytest.raises(pytest.skip.Exception, match="apt-get install"):
        find_chromium()
