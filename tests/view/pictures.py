"""Take the pictures of docs/dashboard.md from real runs: python tests/view/pictures.py RUN..."""

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from jaxrl_async.view.__main__ import made_server

COLUMNS = "state,tags,step,time,best,reward/mean,algorithm.learning_rate,run.seed"
SMALL = {"width": 1180, "height": 330}
PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"


def main(folders: list[Path], pictures: Path = PICTURES) -> None:
    """Write pictures/*.png."""
    with made_server(folders, "127.0.0.1", 0) as server, sync_playwright() as play:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, view, act, options in (
            ("curves", "curves?group=seed&smooth=0.5", None, {}),
            (
                "runs",
                f"table?columns={COLUMNS}",
                None,
                {"viewport": {"width": 1180, "height": 330}},
            ),
            ("samples", "samples?color=advantage&last=20", None, {"color_scheme": "dark"}),
            ("busy", "busy", four_steps, {}),
        ):
            taken(browser, f"{server.address}#{view}", pictures / f"{name}.png", act, options)
        browser.close()
        server.shutdown()


def taken(browser: Any, address: str, path: Path, act: Any, options: dict[str, Any]) -> None:
    """Take one picture."""
    size = {"width": 1180, "height": 700}
    page = browser.new_context(**{"viewport": size} | options).new_page()
    page.goto(address)
    page.wait_for_timeout(3000)
    if act is not None:
        act(page)
        page.wait_for_timeout(1000)
    page.screenshot(path=path)
    page.context.close()


def four_steps(page: Page) -> None:
    """Look at a few steps of the newest run."""
    page.locator("#runs input").first.wait_for()
    for box in page.locator("#runs input").all()[1:]:
        box.uncheck()
    page.locator("[name=first]").last.fill("11")
    page.locator("[name=last]").last.fill("14")
    page.get_by_role("button", name="show").first.click()


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
