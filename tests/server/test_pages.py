"""The pages: files without key or data, nothing from elsewhere, a real browser that uses them."""

import re
import shutil

import pytest
from fake_engine import FakeEngine

from jaxserve.scheduler.stats import Standing
from jaxserve.server import pages
from tests.server.conftest import Client, serving


def test_files_come_with_their_types_and_a_strict_policy(client):
    for path, kind in (
        ("/", "text/html"), ("/dashboard", "text/html"), ("/static/chat.js", "text/javascript"),
        ("/static/style.css", "text/css"),
    ):  # fmt: skip
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "default-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "..%2fapp.py", "%2e%2e/app.py", "."])
def test_other_names_are_404(client, name):
    assert client.get(f"http://test/static/{name}").status_code == 404


@pytest.mark.parametrize("name", sorted(pages._FILES))
def test_nothing_is_fetched_from_elsewhere(name):
    text = pages._FILES[name][0].decode()
    assert not re.search(r"https?://|//cdn|@import|innerHTML|eval\(", text)


def test_stats_need_a_key_and_the_pages_do_not(tmp_path):
    (tmp_path / "keys").write_text("k\n")
    client = Client(FakeEngine(), api_keys_file=str(tmp_path / "keys"))
    assert client.get("/").status_code == client.get("/static/chat.js").status_code == 200
    assert client.get("/stats").status_code == 401
    stats = client.get("/stats", headers={"Authorization": "Bearer k"}).json()
    assert stats["health"]["status"] == "ready" and stats["engine"]["slots"] == 16
    assert stats["tenants"] == []


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    yield page
    page.close()
    assert page.faults == []


def say(page, text):
    page.fill("textarea[name=text]", text)
    page.keyboard.press("Enter")


def test_a_conversation_in_a_browser(page):
    engine = FakeEngine(max_model_len=1000)
    engine.scripts["tell"] = "Žlutý 🙂 <b>kůň</b>".encode()
    with serving(engine) as running:
        page.goto(running.url)
        page.fill("textarea[name=system]", "be brief")
        say(page, "tell me")
        page.locator(".figures").nth(0).wait_for()
        assert page.locator(".turn.assistant .text").inner_text() == "Žlutý 🙂 <b>kůň</b>"
        assert "tokens/s" in page.locator(".figures").inner_text()
        page.check("input[name=shading]")
        say(page, "tell me again")
        page.locator(".figures").nth(1).wait_for()
        shaded = page.locator(".turn.assistant .text").nth(1)
        assert shaded.inner_text() == "Žlutý 🙂 <b>kůň</b>"
        assert shaded.locator(".token").count() == len("Žlutý 🙂 <b>kůň</b>".encode())
        prompt = engine.tokenizer.decode(engine.calls[-1].prompt_ids)
        assert prompt.startswith("system\nbe brief") and prompt.count("Žlutý") == 1
        page.fill("input[name=temperature]", "101")
        say(page, "tell me")
        page.locator(".error").wait_for()
        assert "temperature" in page.locator(".error").inner_text()


def test_stop_in_a_browser_ends_the_request(page):
    engine = FakeEngine()
    engine.hold()
    with serving(engine) as running:
        page.goto(running.url)
        say(page, "wait")
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Send").wait_for()
        for _ in range(500):
            if engine.aborted:
                break
            page.wait_for_timeout(20)
        assert len(engine.aborted) == 1


def test_settings_on_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 844})
    with serving(FakeEngine()) as running:
        page.goto(running.url)
        schema = page.locator("textarea[name=schema]")
        assert not schema.is_visible()
        page.get_by_role("button", name="Settings").click()
        schema.fill('{"type": "integer"}')
        page.get_by_role("button", name="Settings").click()
        assert not schema.is_visible() and page.locator("#send").is_visible()


def test_the_dashboard_in_a_browser(page):
    engine = FakeEngine()
    engine.counts.running, engine.counts.waiting = 5, 3
    with serving(engine) as running:
        engine.counts.guard_actions = ("pause admission",)
        engine.tenants = [Standing("a1b2", 4, 2, 5000.0), Standing("", 1, 1, 0.0)]
        page.goto(running.url + "/dashboard")
        page.locator(".slots i.busy").nth(4).wait_for()
        assert "pause admission" in page.locator("#board").inner_text()
        rows = page.locator("#board table tr").all_inner_texts()
        assert [row.split() for row in rows[1:]] == [
            ["a1b2", "4", "2", "+5,000"], ["everybody", "1", "1", "+0"],
        ]  # fmt: skip
        assert page.locator(".slots i.busy").count() == 5
        assert "fake-model" in page.locator("#facts").inner_text()
