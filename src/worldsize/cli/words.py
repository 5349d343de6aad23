"""Room: which words of a command line are ours and which the program's. They stand on either side of the script."""

from __future__ import annotations

import click

_SURELY_OURS = frozenset({"--nproc-per-node", "--nnodes", "--node-rank", "--hosts", "--hostfile", "--rdzv-endpoint"})


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


class OursFirst(click.Command):
    """Finds out which arguments are ours, whichever side of the script they stand on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Bring options that stand between the script and a `--` before the script."""
        return super().parse_args(ctx, self._ours_first(ctx, args))

    def _ours_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = self._words(ctx, args)
        before = args[: len(args) - len(words)]
        if "--" in before[-1:]:
            return args
        if "--" not in words[1:]:
            self._warn_of_slips(ctx, words)
            return args
        cut = words.index("--", 1)
        script, between, own = words[0], words[1:cut], words[cut + 1 :]
        strange = self._not_ours(ctx, between)
        if strange:
            raise click.UsageError(
                f"between the script and `--` may stand only options of `{ctx.command_path}`, not {strange!r}: if the "
                f"`--` is the program's, write `{ctx.command_path} ... -- {script} ...`",
                ctx,
            )
        return [*before, *between, "--", script, *own]

    def _warn_of_slips(self, ctx: click.Context, words: list[str]) -> None:
        """Say where a word is most likely a slip. It stays the program's, as every word behind the script is (B025)."""
        slip = next((word for word in words[1:] if _name(word) in _SURELY_OURS), None)
        if slip is not None:
            click.echo(
                f"{ctx.command_path}: {_name(slip)} stands behind the script, so it is the program's. If it is meant for us, "
                f"write it before {words[0]}, or a `--` behind it",
                err=True,
            )

    def _not_ours(self, ctx: click.Context, between: list[str]) -> str | None:
        """The first word that is no option of ours."""
        try:
            return next(iter(self._words(ctx, between)), None)
        except click.NoSuchOption as error:
            return error.option_name

    def _words(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What is left when the options at the front are taken."""
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = found.get("words")
        return list(words) if isinstance(words, list | tuple) else []
