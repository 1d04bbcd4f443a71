"""Links in a step's Markdown summary, made whole: KFP shows the summary far from the prefix that it speaks of.

Left out: whether a browser opens them. The KFP UI shows an s3:// link as what it is, to be copied.
"""

import re
from collections.abc import Mapping
from urllib.parse import quote

from crosstrain.components.core.report import markdown_text

_RELATIVE = re.compile(r"\]\((?![a-z][a-z0-9+.-]*:|[/#<])([^)\s]+)\)")


def with_links(markdown: str, uri: str, artifacts: Mapping[str, str]) -> str:
    """A summary whose relative links lead into `uri`, and below it where each artifact of the step lies.

    Args:
        markdown: As the program wrote it; a relative link names an object of its output.
        uri: The output's prefix.
        artifacts: Name of an input or output to its prefix.
    """
    resolved = _RELATIVE.sub(lambda found: f"]({_target(f'{uri}/{found[1]}')})", markdown)
    lines = [f"- {name}: [{markdown_text(place)}]({_target(place)})" for name, place in artifacts.items()]
    return "\n".join([resolved.rstrip("\n"), "", "**Artifacts**", "", *lines, ""])


def _target(location: str) -> str:
    """A location as a link's target: what would end the link is escaped."""
    return quote(location, safe="/:@!$&'*+,;=-._~")
