"""Laws that every method of kvjax obeys: test your own.

    import kvjax.testing

    def test_mine():
      kvjax.testing.check(Mine)           # all laws, one after the other

    @pytest.mark.parametrize("law", kvjax.testing.LAWS)
    def test_laws(law):
      kvjax.testing.LAWS[law](kvjax.testing.Case(Mine))     # each by itself

`Layer` runs one layer of a method on given q, k and v, for oracles; `Run` a small decoder.
"""

from kvjax.testing.laws import LAWS, Case, check
from kvjax.testing.layer import Layer, Stream
from kvjax.testing.tiny import Run

__all__ = ["LAWS", "Case", "Layer", "Run", "Stream", "check"]
