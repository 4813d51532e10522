"""The viewer in a real browser: open, navigate, point, colour, what would have broken, groups, plots, live, long
sessions, export."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

import tokentrue as tt
from tests.viewer.browser import open_browser, serve, violations, watched
from tests.viewer.world import (
    TASKS,
    Told,
    build_store,
    long_sample,
    play,
    renderer,
    run_apart,
    store_samples,
    write_trainer_file,
)
from tokentrue.samples.trainer_logprobs import read_trainer_logprobs
from tokentrue.sessions import Journal
from tokentrue.viewer import (
    Chart,
    Report,
    ReportTable,
    SampleList,
    SessionList,
    StoreSource,
    ViewerData,
    write_export,
    write_report,
)

VIEWS = (
    "",
    "#/session/task0-rollout1",
    "#/session/task0-rollout2/x/breaks",
    "#/groups",
    "#/group/task-0",
    "#/mismatch",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("viewer") / "runs.sqlite")


@pytest.fixture(scope="module")
def trainer(store: Path) -> Path:
    return write_trainer_file(store.with_name("trainer.jsonl"), store_samples(store))


@pytest.fixture(scope="module")
def data(store: Path, trainer: Path) -> Iterator[ViewerData]:
    source = StoreSource(Journal(f"sqlite:{store}", read_only=True), name=store.name)
    yield ViewerData(source, renderer=renderer(), trainer=read_trainer_logprobs(trainer))
    source.close()


@pytest.fixture(scope="module")
def url(data: ViewerData) -> Iterator[str]:
    with serve(data) as base:
        yield base


def test_sessions_are_listed_filtered_and_opened(browser: Browser, url: str) -> None:
    with watched(browser, url) as seen:
        page = seen.open()
        rows = page.locator(".sessions tbody tr")
        expect(rows).to_have_count(8)
        page.get_by_placeholder("session or group").fill("task-0")
        expect(rows).to_have_count(4)
        page.get_by_label("coverage below 100%").check()
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("task0-rollout1")
        rows.first.locator("a").focus()
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("task0-rollout1")
        expect(page.locator(".tree")).to_contain_text("not trained: retried")
        seen.check()


@pytest.mark.slow
def test_a_token_says_everything_about_itself(browser: Browser, url: str, data: ViewerData) -> None:
    branch = data.branch("task0-rollout2", data.session("task0-rollout2")["branches"][0]["sample_id"])
    first = next(block["body"] for block in branch["blocks"] if block["kind"] == "sampled")
    with watched(browser, url) as seen:
        page = seen.open("#/session/task0-rollout2")
        page.locator(f"[data-i='{first}']").hover()
        inspector = page.get_by_label("Token", exact=True)
        expect(inspector).to_contain_text(f"id{branch['token_ids'][first]}")
        expect(inspector).to_contain_text("3c 74 68 69 6e 6b 3e")  # <think>
        expect(inspector).to_contain_text(f"{branch['rollout_logprobs'][first]:.6f}".replace("-", "−"))
        expect(inspector).to_contain_text("sampled and trained")
        seen.check()


@pytest.mark.slow
def test_the_keyboard_moves_through_tokens(browser: Browser, url: str, data: ViewerData) -> None:
    branch = data.branch("task0-rollout2", data.session("task0-rollout2")["branches"][0]["sample_id"])
    sampled = [block["body"] for block in branch["blocks"] if block["kind"] == "sampled"]
    with watched(browser, url) as seen:
        page = seen.open("#/session/task0-rollout2")
        grid = page.get_by_role("grid")
        grid.focus()
        page.keyboard.press("n")
        expect(grid).to_have_attribute("aria-activedescendant", f"t{sampled[0]}")
        page.keyboard.press("n")
        page.keyboard.press("ArrowRight")
        expect(grid).to_have_attribute("aria-activedescendant", f"t{sampled[1] + 1}")
        expect(page.locator(".t.active")).to_be_in_viewport()
        expect(page.locator("[aria-live=polite]")).to_contain_text(f"token {sampled[1] + 1}")
        page.keyboard.press("End")
        expect(grid).to_have_attribute("aria-activedescendant", f"t{len(branch['token_ids']) - 1}")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_be_visible()
        seen.check()


@pytest.mark.slow
def test_colourings_change_the_tokens(browser: Browser, url: str) -> None:
    with watched(browser, url) as seen:
        page = seen.open("#/session/task0-rollout2")
        token = page.locator(".t.sampled").first
        classes = set()
        for name in ("log-probability", "policy version", "entropy", "δ", "advantage"):
            page.get_by_role("radio", name=name, exact=True).check(force=True)
            page.wait_for_timeout(50)
            classes.add((token.get_attribute("class") or "").split()[-1][0])
        assert classes == {"q", "v", "d"}
        seen.check()


@pytest.mark.slow
def test_what_would_have_broken(browser: Browser, url: str, data: ViewerData) -> None:
    sample = data.session("task0-rollout2")["branches"][0]["sample_id"]
    found = data.breaks("task0-rollout2", sample)
    with watched(browser, url) as seen:
        page = seen.open("#/session/task0-rollout2")
        page.get_by_role("tab", name="What would have broken").click()
        expect(page.locator(".headline")).to_contain_text(f"{found['lost']} of {found['sampled']}")
        expect(page.locator(".diff tbody tr")).to_have_count(len(found["breaks"]))
        page.get_by_role("button", name="reasoning removed").click()
        expect(page.locator(".diff tbody tr")).to_have_count(
            sum(one[0] == "reasoning removed" for one in found["breaks"])
        )
        page.locator(".diff tbody button").first.click()
        expect(page.locator(".t.active")).to_have_attribute("id", f"t{found['first']}")
        seen.check()


@pytest.mark.slow
def test_a_group_is_shown_side_by_side(browser: Browser, url: str) -> None:
    with watched(browser, url) as seen:
        page = seen.open("#/groups")
        page.get_by_role("link", name="task-1").click()
        expect(page.locator(".rollouts > li")).to_have_count(4)
        expect(page.locator(".rollouts > li").first).to_contain_text("1.000")
        expect(page.locator(".rollouts > li").last).to_contain_text("−")
        seen.check()


@pytest.mark.slow
def test_mismatch_plots(browser: Browser, url: str) -> None:
    with watched(browser, url) as seen:
        page = seen.open("#/mismatch")
        expect(page.locator(".chart canvas")).to_have_count(5)
        expect(page.locator("main")).to_contain_text("log-probabilities differ")
        seen.check()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_accessible(browser: Browser, url: str, theme: str) -> None:
    with watched(browser, url, theme=theme) as seen:
        for view in VIEWS:
            page = seen.open(view)
            page.wait_for_timeout(400)
            assert violations(page) == [], f"{view} in {theme}"
        seen.check()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_keep_text_readable(browser: Browser, url: str, theme: str) -> None:
    """Every class of every scale, behind the token's ink, by axe's own contrast rule."""
    with watched(browser, url, theme=theme) as seen:
        page = seen.open()
        page.evaluate(
            """() => { const main = document.querySelector('main');
            for (const scale of ['q', 'd', 'v']) for (let i = 0; i < 9; i++) {
              const token = document.createElement('span'); token.className = `t sampled ${scale}${i}`; token.textContent = 'token';
              main.append(token); } }"""
        )
        assert violations(page) == []


@pytest.mark.slow
def test_a_live_source_grows_on_the_page(browser: Browser, tmp_path: Path) -> None:
    journal, engine = Journal(f"sqlite:{tmp_path / 'live.sqlite'}"), Told()

    async def run(name: str, turns: int) -> None:
        session = tt.Session(renderer=renderer(), provider=engine, journal=journal, session_id=name)
        await session.wait_created()
        await play(session, engine, TASKS[0], seed=1, turns=turns)

    run_apart(run("early", 1))
    with (
        serve(ViewerData(StoreSource(journal, name="live", kind="gateway"), renderer=renderer())) as base,
        watched(browser, base) as seen,
    ):
        page = seen.open()
        expect(page.locator(".sessions tbody tr")).to_have_count(1)
        run_apart(run("late", 2))
        expect(page.locator(".sessions tbody tr")).to_have_count(2)
        seen.check()
    journal.close()


def frame_times(page: Any) -> list[float]:
    """Milliseconds that the page's main thread works for each frame (script, style, layout) while the tokens are
    scrolled, a page or a
    far jump each frame. Processor time of the thread: other processes of the machine do not count."""
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})

    def worked() -> float:
        metrics = {one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]}
        return 1000 * metrics["TaskDuration"]

    times: list[float] = []
    for number in range(60):
        before = worked()
        page.evaluate(
            """(share) => new Promise((done) => { const s = document.querySelector('.scroller');
            s.scrollTop = share === null ? s.scrollTop + s.clientHeight / 2 : share * s.scrollHeight;
            requestAnimationFrame(() => requestAnimationFrame(done)); })""",
            number * 0.37 % 0.9 if number % 3 == 2 else None,
        )
        times.append(worked() - before)
    return times


@pytest.mark.slow
def test_a_hundred_thousand_tokens_scroll_like_five_thousand(browser: Browser) -> None:
    """A ratio in one run. The time itself is printed: 95% of the frames took 40 ms on two idle cores."""
    lengths = {"short": 5_000, "long": 100_000}
    samples = [replace(long_sample(tokens), sample_id=f"{name}-0", session_id=name) for name, tokens in lengths.items()]
    data = ViewerData(SampleList(samples, name="lengths"), renderer=renderer())
    with serve(data) as base, watched(browser, base) as seen:
        medians: dict[str, float] = {}
        for name in lengths:
            page = seen.open(f"#/session/{name}")
            page.wait_for_selector(".t.sampled")
            times = sorted(frame_times(page))
            medians[name] = statistics.median(times)
            print(
                f"{name}, frame ms: median {medians[name]:.1f}, 95% {times[int(len(times) * 0.95)]:.1f}, max {times[-1]:.1f}"
            )
        assert medians["long"] < 2 * medians["short"]
        assert page.locator(".t").count() < 6000  # virtualised: only what is in sight is in the document
        page.get_by_role("grid").focus()
        page.keyboard.press("End")
        expect(page.locator(".t.active")).to_have_attribute("id", f"t{len(long_sample().token_ids) - 1}")
        expect(page.locator(".t.active")).to_be_in_viewport()
        seen.check()


def test_the_export_is_the_same_page_in_one_file(browser: Browser, data: ViewerData, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert write_export(data, target) == 8
    with watched(browser, f"file://{target}") as seen:
        page = seen.open()
        expect(page.locator(".sessions tbody tr")).to_have_count(8)
        page = seen.open("#/session/task0-rollout2")
        page.get_by_role("tab", name="What would have broken").click()
        expect(page.locator(".headline")).to_contain_text("sampled tokens lost or replaced")
        page = seen.open("#/group/task-0")
        expect(page.locator(".rollouts > li")).to_have_count(4)
        page = seen.open("#/mismatch")
        expect(page.locator(".chart canvas")).to_have_count(5)
        assert violations(page) == []
        seen.check()


@pytest.mark.slow
def test_a_report_has_charts_and_rollouts(browser: Browser, data: ViewerData, tmp_path: Path) -> None:
    steps = [1.0, 2.0, 3.0]
    report = Report(
        title="A run",
        verdict="It went up.",
        highlights=[("reward after", "0.750")],
        charts=[
            Chart(title="Reward", x_label="step", y_label="reward", x=steps, series={"reward": [0.1, None, 0.7]}),
            Chart(
                title="Both",
                x_label="",
                y_label="reward",
                labels=("before", "after"),
                kind="bars",
                series={"r": [0.1, 0.7]},
            ),
        ],
        tables=[ReportTable(title="Steps", columns=("step", "reward"), rows=[("1", 0.1)])],
    )
    target = tmp_path / "report.html"
    views = [data.source.load_session(name) for name in ("task0-rollout0", "task0-rollout1")]
    chosen = SessionList(views, name=data.source.name, kind=data.source.kind)
    write_report(target, report, source=chosen, renderer=renderer())
    with watched(browser, f"file://{target}") as seen:
        page = seen.open()
        expect(page.locator("h1")).to_have_text("A run")
        expect(page.locator(".chart canvas")).to_have_count(2)
        assert violations(page) == []
        page.get_by_role("link", name="Groups").click()
        page.get_by_role("link", name="task-0").click()
        expect(page.locator(".rollouts > li")).to_have_count(2)
        expect(page.get_by_role("link", name="Mismatch")).to_have_count(0)
        seen.check()


@pytest.mark.slow
def test_without_a_model_ids_are_shown_and_the_cure_is_named(browser: Browser, store: Path) -> None:
    with serve(ViewerData(SampleList(store_samples(store), name="samples"))) as base, watched(browser, base) as seen:
        page = seen.open("#/session/task0-rollout2")
        expect(page.locator(".t").first).to_have_text(str(store_samples(store)[0].token_ids[0]))
        page.get_by_role("tab", name="What would have broken").click()
        expect(page.get_by_role("alert")).to_contain_text("--model DIR")
