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
        expect(page.locator(".totals")).to_contain_text("sessions8")
        expect(rows.first.locator(".c-task")).not_to_be_empty()
        page.get_by_placeholder("session or group").fill("task-0")
        expect(rows).to_have_count(4)
        assert page.evaluate("location.hash") == "#/sessions?text=task-0", "the address keeps the filter"
        page.get_by_label("coverage below 100%").check()
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("task0-rollout1")
        rows.first.locator("td:first-child a").focus()
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
              const token = document.createElement('span');
              token.className = `t sampled ${scale}${i}`; token.textContent = 'token';
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


FORMS = {
    "light": ("light", {"width": 1440, "height": 860}),
    "dark": ("dark", {"width": 1440, "height": 860}),
    "phone": ("light", {"width": 390, "height": 844}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_view_has_its_parts_in_every_form(browser: Browser, url: str, form: str) -> None:
    """Structure, not pixels: nothing is wider than the window, and each view has its parts in sight."""
    theme, size = FORMS[form]
    parts = {
        "": (".totals", ".filters", ".sessions thead th", ".sessions .reward"),
        "#/session/task0-rollout1": (".session-head", ".tree button", ".toolbar .tabs", ".scroller"),
        "#/session/task0-rollout2/x/breaks": (".headline", ".ribbon", ".diff tbody tr"),
        "#/groups": ("table.list", "input[type=checkbox]", ".dots"),
        "#/group/task-0": (".rollouts > li", ".strip"),
        "#/compare/task-0/task-1": (".half h2", ".half .rollouts > li"),
        "#/mismatch": (".chart canvas",),
    }
    with watched(browser, url, theme=theme, size=size) as seen:
        for view, selectors in parts.items():
            page = seen.open(view)
            for selector in selectors:
                expect(page.locator(selector).first).to_be_attached()
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{view} is {wide} pixels wider than the window"
            inside = page.locator(".rollouts > li").last
            if inside.count():
                box = inside.bounding_box()
                assert box is not None and box["x"] + box["width"] <= size["width"] + 1, (
                    "no rollout lies beyond the edge"
                )
        seen.check()


@pytest.mark.slow
def test_a_filter_a_note_and_an_order_are_in_the_address(browser: Browser, url: str) -> None:
    with watched(browser, url) as seen:
        page = seen.open("#/sessions?text=task-0&sort=-reward&note=see%20the%20retries")
        expect(page.locator(".sessions tbody tr")).to_have_count(4)
        expect(page.locator(".note-text")).to_have_text("see the retries")
        expect(page.locator("th[aria-sort=descending]")).to_contain_text("reward")
        page.get_by_label("forked").check()
        assert "forked=1" in page.evaluate("location.hash") and "note=see" in page.evaluate("location.hash")
        seen.check()


@pytest.mark.slow
def test_messages_are_found_and_the_tree_follows_the_cursor(browser: Browser, url: str) -> None:
    with watched(browser, url) as seen:
        page = seen.open()
        page.get_by_placeholder("Enter searches messages").fill("module that was removed")
        page.keyboard.press("Enter")
        expect(page.locator(".found li").first).to_contain_text("Delete it.")
        expect(page.locator(".sessions tbody tr")).to_have_count(8)  # those with a message stay in the list
        page.locator(".found a").first.click()
        page.wait_for_selector(".t.sampled")
        expect(page.locator(".tree .at .turn")).to_have_text("1")
        page.get_by_role("grid").focus()
        for _ in range(2):
            page.keyboard.press("n")
        expect(page.locator(".tree .at .turn")).to_have_text("2")
        expect(page.locator(".turns tbody tr").nth(1)).to_be_attached()
        seen.check()


def test_totals_are_of_all_sessions(browser: Browser, data: ViewerData) -> None:
    """More sessions than the list holds: the sums are those of all, by plain addition."""
    sample = replace(store_samples_of(data), reward=None)
    rows = [replace(sample, sample_id=f"s{n}", session_id=f"s{n}", reward=float(n % 2)) for n in range(620)]
    with serve(ViewerData(SampleList(rows, name="many"))) as base, watched(browser, base) as seen:
        page = seen.open()
        totals = page.locator(".totals")
        expect(totals).to_contain_text("sessions620")
        expect(totals).to_contain_text(f"sampled tokens{620 * sum(sample.loss_mask):,}")
        expect(totals).to_contain_text("mean reward0.500")
        expect(page.locator(".sessions tbody tr")).to_have_count(500)
        expect(page.locator(".curves canvas")).to_have_count(2)
        page.get_by_role("button", name="Older sessions").click()
        expect(page.locator(".sessions tbody tr")).to_have_count(620)
        seen.check()


@pytest.mark.slow
def test_a_row_leads_to_its_first_break(browser: Browser, url: str, data: ViewerData) -> None:
    sample = data.session("task0-rollout2")["branches"][0]["sample_id"]
    found = data.breaks("task0-rollout2", sample)
    with watched(browser, url) as seen:
        page = seen.open("#/sessions?text=task0-rollout2")
        link = page.locator(".c-break a")
        expect(link).to_have_text(found["breaks"][0][0])
        link.click()
        expect(page.locator(".headline")).to_contain_text(f"{found['lost']} of {found['sampled']}")
        seen.check()


@pytest.mark.slow
def test_the_header_of_a_long_list_stays(browser: Browser, data: ViewerData) -> None:
    sample = store_samples_of(data)
    many = SampleList([replace(sample, sample_id=f"s{n}", session_id=f"s{n}") for n in range(200)], name="many")
    for size in ({"width": 1440, "height": 700}, {"width": 390, "height": 700}):
        with serve(ViewerData(many, renderer=renderer())) as base, watched(browser, base, size=size) as seen:
            page = seen.open()
            expect(page.locator(".sessions tbody tr")).to_have_count(200)
            page.locator(".sessions tbody tr").nth(150).scroll_into_view_if_needed()
            head = page.locator(".sessions thead th").first
            expect(head).to_be_in_viewport()
            assert page.evaluate(
                """() => { const th = document.querySelector('.sessions thead th').getBoundingClientRect();
                return document.elementFromPoint(th.x + 5, th.y + th.height / 2).closest('thead') !== null; }"""
            ), "rows scroll below it"
            seen.check()


def store_samples_of(data: ViewerData) -> Any:
    return data.source.load_session("task0-rollout0").branches[0].sample


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["store", "gateway"])
def test_an_empty_source_says_what_to_do(browser: Browser, kind: Any) -> None:
    source = SessionList((), name="runs.sqlite", kind=kind)
    with serve(ViewerData(source)) as base, watched(browser, base) as seen:
        page = seen.open()
        expect(page.locator(".empty")).to_contain_text("tokentrue serve" if kind == "store" else "POST")
        seen.check()


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
            late = f"95% {times[int(len(times) * 0.95)]:.1f}, max {times[-1]:.1f}"
            print(f"{name}, frame ms: median {medians[name]:.1f}, {late}")
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
