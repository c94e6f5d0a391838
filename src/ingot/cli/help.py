"""`ingot help`: a topic, or the help of a command."""

import click
from click.shell_completion import CompletionItem

from ingot.cli import console
from ingot.cli.topics import TOPICS
from ingot.configs.read import nearest
from ingot.errors import UsageError


def _complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    return [CompletionItem(name, help=topic.summary) for name, topic in TOPICS.items() if name.startswith(begun)]


@click.command()
@click.argument("topic", nargs=-1, metavar="[TOPIC | COMMAND]", shell_complete=_complete)
@click.pass_context
def command(context: click.Context, topic: tuple[str, ...]) -> None:
    """Explain a topic or a command. Without a name: list the topics.

    \b
    Example: ingot help exit_codes
    """
    parent = context.parent
    assert parent is not None, "help is a command of the group"
    if not topic:
        print(f"{parent.get_help()}\n\nTopics (ingot help TOPIC):")
        print("\n".join(f"  {name:<12} {each.summary}" for name, each in TOPICS.items()))
        return
    name = topic[0].replace("-", "_")
    if name in TOPICS and len(topic) == 1:
        print(console.wrapped(TOPICS[name].text(), console.terminal_width() or console.WIDEST))
        return
    print(_command_help(parent, topic))


def _command_help(parent: click.Context, names: tuple[str, ...]) -> str:
    found, context = parent.command, parent
    for name in names:
        child = found.get_command(context, name) if isinstance(found, click.Group) else None
        if child is None:
            known = [*TOPICS, *(found.list_commands(context) if isinstance(found, click.Group) else ())]
            raise UsageError(
                f"there is no topic or command {' '.join(names)!r}",
                expected=", ".join(known),
                hint=nearest(name, known) or "`ingot help` lists topics and commands",
            )
        found, context = child, click.Context(child, info_name=name, parent=context, **child.context_settings)
    return found.get_help(context)
