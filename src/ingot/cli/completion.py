"""`ingot completion SHELL`: a script that completes commands, options and their values. click makes it."""

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_INGOT_COMPLETE"  # click looks for it when the completed program starts


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and values of ingot.

    \b
    bash: add to ~/.bashrc    eval "$(ingot completion bash)"
    zsh:  add to ~/.zshrc     eval "$(ingot completion zsh)"
    fish: ingot completion fish > ~/.config/fish/completions/ingot.fish
    \b
    Example: ingot completion bash
    """
    made = get_completion_class(shell)
    assert made is not None, "click knows the shells of the choice"
    print(made(context.find_root().command, {}, "ingot", _VARIABLE).source())
