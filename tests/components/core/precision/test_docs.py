"""docs/fp8.md says of backends and recipes what the code does."""

from pathlib import Path

import pytest
import torch

from crosstrain.components.core.precision import choose
from crosstrain.components.core.precision.base import BACKENDS
from crosstrain.components.core.precision.recipes import RECIPES

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "fp8.md").read_text()


def rows(after: str) -> list[list[str]]:
    """Cells of the first table after some words, its head left out."""
    lines = PAGE[PAGE.index(after) :].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_table_of_backends_is_the_codes():
    assert {name: {"cpu": cpu, "cuda": cuda} for name, cpu, cuda in rows("## Which backend")} == BACKENDS


def test_the_multiples_are_the_codes():
    found = {name: int(row[-1]) for row in rows("## The recipes") for name in row[0].split(", ")}
    assert found == {name: recipe.alignment for name, recipe in RECIPES.items()}


@pytest.mark.parametrize("recipe", list(BACKENDS))
def test_an_emulated_recipe_says_so_under_a_name_that_the_page_gives(recipe):
    precision = choose("fp8", torch.device("cpu"), recipe=recipe)
    assert precision.emulated and precision.name.endswith("emulated") and f"`{precision.name}`" in PAGE
