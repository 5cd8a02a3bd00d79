"""What the server of a model can, as `server_probe` has found out."""

from __future__ import annotations

from dataclasses import dataclass

COMPLETIONS, LLAMA_CPP = "OpenAI's completions", "llama.cpp's own /completion"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the server of a model can.

    Attributes
    ----------
    server : str
        Name and version, as far as the server tells them.
    root : str or None
        What the server says it has loaded under the model's name.
    route : str
        How it is asked.
    echo : bool
        Whether it gives the log-probabilities of a prompt's own tokens, each at its own position.
    shifted : bool
        Whether it echoes them one position too late, so that its echo cannot be used.
    steps : bool
        Whether the list of the token that comes next is the echoed one, so that options of one token share a request.
    n_top : int
        Most probable tokens that it shows at a position.
    ids_in, ids_out : bool
        Whether prompts are sent, and tokens are named, by their ids; otherwise as text.
    forces : bool
        Whether it can be made to write a token, and then says the log-probability that the token had before.
    drops_first : bool
        Whether its echo leaves out the first token of a text.
    echo_alone : bool
        Whether it echoes without writing a token.
    max_length : int or None
        Tokens of prompt and answer together; None where it does not tell.
    probe : tuple of float
        Log-probabilities of a fixed text, by which the same model is recognised.
    chat : bool
        Whether conversations are sent as chat completions.
    answers : str
        How they are sent, and why, in words.
    """

    server: str
    root: str | None
    route: str
    echo: bool
    shifted: bool
    steps: bool
    n_top: int
    ids_in: bool
    ids_out: bool
    forces: bool
    drops_first: bool
    echo_alone: bool
    max_length: int | None
    probe: tuple[float, ...]
    chat: bool = False
    answers: str = "as completions"

    def lines(self, name: str) -> list[str]:
        """Return what a person should know before numbers come."""
        if self.echo:
            echo = "yes: a request per option" + (", and one for all options of one token" if self.steps else "")
        elif self.shifted:
            echo = "shifted by one position, not used: every scored token is a request of its own"
        else:
            echo = "no: every scored token is a request of its own"
        length = f"{self.max_length:,} tokens" if self.max_length else "not told"
        return [
            f"served model  {name} by {self.server}, over {self.route}",
            f"echo          {echo}",
            f"top list      {self.n_top} log-probabilities at a position",
            f"tokens        sent as {'ids' if self.ids_in else 'text'}, named by {'ids' if self.ids_out else 'text'}; "
            "they are ours",
            f"context       {length}",
            f"conversations {self.answers}",
        ]
