"""What `RepeatSession.decode` means, step by step."""

import dataclasses
import itertools

import numpy as np

from ingot.step_io import Course, DrawRules, Int32, Repeat, Session, StepBatch


def parts(values: Int32, starts: Int32) -> list[list[int]]:
    return [values[begin:end].tolist() for begin, end in itertools.pairwise(starts)]


def joined(lists: list[list[int]]) -> tuple[Int32, Int32]:
    """Starts, and all of them."""
    starts = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return starts, np.array([number for each in lists for number in each], np.int32)


def _words(values: Int32, starts: Int32) -> list[list[list[int]]]:
    found: list[list[list[int]]] = []
    for part in parts(values, starts):
        found.append([[]])
        for token in part:
            if token < 0:
                found[-1].append([])
            else:
                found[-1][-1].append(token)
        assert found[-1].pop() == [], "-1 stands behind every word"
    return found


def _ends(tokens: list[int], word: list[int]) -> bool:
    return tokens[len(tokens) - len(word) :] == word if len(word) <= len(tokens) else False


def _rules_after(rules: DrawRules, repeat: Repeat, lasting: list[int], drawn: list[list[int]]) -> DrawRules:
    """Of the draws after `drawn`, lists of each sequence."""
    histories = [
        h + d[-1:] if h else [] for h, d in zip(parts(rules.history, rules.history_starts), drawn, strict=True)
    ]
    starts, history = joined(histories)
    rules = dataclasses.replace(rules, history=history, history_starts=starts)
    course = repeat.course
    if course is None:
        return rules
    ids = [own[:n] for own, n in zip(parts(rules.bias_ids, rules.bias_starts), lasting, strict=True)]
    values = [rules.bias[begin : begin + n].tolist() for begin, n in zip(rules.bias_starts, lasting, strict=False)]
    tails = [t + d for t, d in zip(parts(course.tails, course.tail_starts), drawn, strict=True)]
    for s, words in enumerate(_words(course.bad_words, course.bad_word_starts)):
        bans = [word[-1] for word in words if _ends(tails[s], word[:-1])]
        if len(drawn[s]) < course.min_steps[s]:
            bans += parts(repeat.end_ids, repeat.end_starts)[s]
        ids[s] += bans
        values[s] += [-np.inf] * len(bans)
    starts, bias_ids = joined(ids)
    bias = np.array([value for own in values for value in own], np.float32)
    return dataclasses.replace(rules, bias_starts=starts, bias_ids=bias_ids, bias=bias)


def _stopped(course: Course, drawn: list[list[int]]) -> bool:
    tails = [t + d for t, d in zip(parts(course.tails, course.tail_starts), drawn, strict=True)]
    words = _words(course.stop_words, course.stop_word_starts)
    return any(
        len(drawn[s]) >= course.min_steps[s] and _ends(tails[s], word) for s, own in enumerate(words) for word in own
    )


def decode_by_run(session: Session, batch: StepBatch, repeat: Repeat) -> int:
    """With `run`."""
    most, sequences = repeat.ids.shape
    drawn: list[list[int]] = [[] for _ in range(sequences)]
    lasting = [] if repeat.course is None else repeat.course.num_lasting.tolist()
    for count in range(1, most + 1):
        result = session.run(batch)
        ids, log_probs = result.ids, result.log_probs
        repeat.ids[count - 1], repeat.log_probs[count - 1] = ids, log_probs
        if repeat.probs is not None:
            assert result.ranks is not None
            assert result.top_ids is not None
            assert result.top_log_probs is not None
            repeat.probs.ranks[count - 1], repeat.probs.top_ids[count - 1] = result.ranks, result.top_ids
            repeat.probs.top_log_probs[count - 1] = result.top_log_probs
        for own, token in zip(drawn, ids.tolist(), strict=True):
            own.append(token)
        ended = any(own[-1] in ends for own, ends in zip(drawn, parts(repeat.end_ids, repeat.end_starts), strict=True))
        ended = ended or (repeat.course is not None and _stopped(repeat.course, drawn))
        if count == most or ended or (ids < 0).any() or not np.isfinite(log_probs).all() or repeat.stop[0]:
            break
        repeat.done[0] = count
        sample = dataclasses.replace(batch.sample, counter=batch.sample.counter + np.uint64(1))
        if sample.rules is not None:
            sample = dataclasses.replace(sample, rules=_rules_after(sample.rules, repeat, lasting, drawn))
        batch = dataclasses.replace(batch, ids=ids, past_lengths=batch.past_lengths + np.int32(1), sample=sample)
    return count
