r"""Converts raw text to Megatron-LM token files, with the same bytes for any number of workers.

    corpus = Corpus(inputs=("corpus/",), output="data/web", tokenizer="gpt2")
    sidecars = prepare(corpus, workers=8)

writes `data/web_text_document.bin`, `.idx` and `.json`. The corpus is split into units of 32
to 128 MiB that depend only on the files. Their tokens stay in a work folder, `data/web.work`, until
all are done:

    any process, any machine      unit 0 -> parts/unit-000000.{bin,idx}   \
    any process, any machine      unit 1 -> parts/unit-000001.{bin,idx}    > joined in order
    any process, any machine      unit 2 -> parts/unit-000002.{bin,idx}   /

The same command may run many times at once, for instance as a job array: each process takes free
units. Killed at any time and restarted, it resumes. Bad documents are handled in input order, so
the first error and the counts do not depend on the workers either. The `.json` is written last:
files without it are incomplete.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec

from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation.join import EmptyCorpusError, empty_corpus, find_stale
from trainyard.corpus.preparation.plan import (
    Identity,
    Output,
    PreparationPlan,
    list_sources,
    plan_corpus,
)
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.corpus.preparation.unit import (
    PLACES_PER_KIND,
    UnitResult,
    count_steps,
    read_unit,
)
from trainyard.corpus.preparation.work_folder import (
    Progress,
    WorkFolder,
    name_process,
    read_progress,
)
from trainyard.corpus.preparation.worker import CorpusWorker, work_in_processes
from trainyard.corpus.sources.batch import Fault
from trainyard.corpus.sources.files import Segment, find_files, format_of
from trainyard.data.sidecar import Sidecar, TokenizerRecord, load_sidecar
from trainyard.data.tokenizer import tokenizer_name
from trainyard.data.vocabulary import GPT2, Vocabulary, load_vocabulary
from trainyard.errors import DataError, MachineError, explain_failure
from trainyard.units import format_bytes

OnError = Literal["stop", "quarantine"]
_log = logging.getLogger("trainyard")
_MOST_BYTES_TO_TRAIN_ON = 1 << 30
_LEAST_VOCABULARY = 320
STATES_PER_SECOND = 2
"""How many workers' states a process reads for its progress, on average."""


def prepare(
    corpus: Corpus,
    *,
    workers: int = 1,
    on_error: OnError = "stop",
    overwrite: bool = False,
    unit_bytes: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_skipped: Callable[[Counter[str]], None] | None = None,
) -> list[Sidecar]:
    """Tokenizes a corpus; what an earlier call left unfinished is taken up, what is done is kept.

    Args:
        corpus: what decides the bytes of the token files.
        workers: processes on this machine; each takes one core.
        on_error: whether a bad document ends the run, or is set aside and counted.
        overwrite: replace token files, and unfinished work, that were made otherwise.
        unit_bytes: how much input a worker takes at a time; None: chosen from the inputs.
        on_progress: called every few seconds with the progress of all workers.
        on_skipped: called with the input files that are not read.

    Raises:
        DataError: an input, a document or the tokenizer is wrong, or the output exists.
        MachineError: the disk is full or cannot be written, or workers keep dying.
    """
    vocabulary = load_vocabulary(corpus.tokenizer)
    tokenizer = record_tokenizer(corpus, vocabulary)
    folder = WorkFolder(work_path(corpus), name_process(os.getpid()))
    folder.sweep()
    sources, skipped = list_sources(corpus)
    if on_skipped is not None:
        on_skipped(skipped)
    plan = plan_corpus(corpus, tokenizer, unit_bytes, sources)
    if overwrite or folder.path.exists() or not plan.is_prepared():
        _check_output(plan, overwrite)
        stale = find_stale(plan)
        _enter(folder, plan, overwrite)
        _work(plan, vocabulary, folder, workers, on_progress, quarantine=on_error == "quarantine")
        for path in stale:
            path.unlink(missing_ok=True)
    return _load_results(plan, on_error)


def _work(
    plan: PreparationPlan,
    vocabulary: Vocabulary,
    folder: WorkFolder,
    workers: int,
    on_progress: Callable[[Progress], None] | None,
    *,
    quarantine: bool,
) -> None:
    next_progress = float("-inf")

    def on_beat() -> None:
        nonlocal next_progress
        if on_progress is None or time.monotonic() < next_progress:
            return
        if progress := read_progress(folder, plan):
            # So that what it costs does not grow with the workers.
            next_progress = time.monotonic() + len(progress.workers) / STATES_PER_SECOND
            on_progress(progress)

    n_workers = max(1, min(workers, len(plan.units)))
    try:
        if n_workers == 1:
            CorpusWorker(plan, folder, vocabulary, quarantine=quarantine).work(on_beat)
        else:
            work_in_processes(plan, vocabulary, folder, n_workers, on_beat, quarantine=quarantine)
    except EmptyCorpusError:
        folder.remove()  # nothing in it is worth going on with
        raise


def _load_results(plan: PreparationPlan, on_error: OnError) -> list[Sidecar]:
    sidecars = [load_sidecar(output.prefix) for output in plan.outputs]
    places = [place for sidecar in sidecars for place in sidecar.quarantined_places]
    if places and on_error == "stop":
        raise DataError(
            f"{places[0]}; an earlier run set it aside",
            "pass --on-error quarantine to accept it, or --overwrite to start over",
        )
    return sidecars


def read_status(corpus: Corpus) -> Progress | None:
    """Returns how far work on a corpus is that other processes do; None where there is none.

    Raises:
        DataError: an input is missing, or the work is on another corpus.
    """
    folder = WorkFolder(work_path(corpus), name_process(os.getpid()))
    begun = _read_identity(folder)
    if begun is None:
        return None
    plan = plan_corpus(
        corpus, record_tokenizer(corpus, load_vocabulary(corpus.tokenizer)), begun.unit_bytes
    )
    hint = "use the command that started it"
    plan.identity.check_equal(begun, f"{folder.path} was begun", hint)
    return read_progress(folder, plan)


def work_path(corpus: Corpus) -> Path:
    """Names the folder of unfinished work of a corpus."""
    return Path(f"{corpus.output}.work")


def choose_tokenizer(corpus: Corpus, vocabulary_size: int = 0) -> tuple[Corpus, int]:
    """Chooses the tokenizer of a corpus that names none.

    Args:
        corpus: to be tokenized.
        vocabulary_size: of the tokenizer to train; 0: chosen from the size of the inputs.

    Returns:
        The corpus with its tokenizer, and the vocabulary size to train: a power of two that grows
        with the cube root of the inputs, such as 2048 for 1 MB and 4096 for 10 MB. Above 1 GiB:
        GPT-2's tokenizer, and 0.

    Raises:
        DataError: an input is wrong.
    """
    trained = corpus.model_copy(update={"tokenizer": f"{corpus.output}_tokenizer"})
    if vocabulary_size:
        return trained, vocabulary_size
    n_bytes = sum(path.stat().st_size for path in find_files(corpus.inputs))
    if n_bytes > _MOST_BYTES_TO_TRAIN_ON:
        return corpus.model_copy(update={"tokenizer": GPT2}), 0
    suitable = 1 << int(math.log2(max(1.0, 24 * n_bytes ** (1 / 3))))
    return trained, max(_LEAST_VOCABULARY, suitable)


def train_on_inputs(
    corpus: Corpus,
    vocabulary_size: int,
    *,
    overwrite: bool,
    on_error: OnError = "stop",
    or_fewer: bool = False,
) -> None:
    """Trains a tokenizer on the documents of a corpus and saves it as `corpus.tokenizer`.

    An existing one is kept if the work on this corpus began with it, or if training gives the same
    one: many processes may start at once, and any of them may be killed here. With `or_fewer` it
    has fewer tokens if the documents give no more.

    Raises:
        DataError: an input or a document is wrong, there is too little text, or the tokenizer is
            the included `gpt2`.
    """
    if corpus.tokenizer == GPT2:
        hint = f"name a folder to train one into, such as ./{GPT2}, or leave out --train-tokenizer"
        raise DataError(f"the tokenizer {GPT2} ships with Trainyard and cannot be trained", hint)
    folder = Path(corpus.tokenizer)
    path = folder / "tokenizer.json"
    is_there = path.exists() and not overwrite
    if is_there:
        plan = plan_corpus(corpus, record_tokenizer(corpus, load_vocabulary(corpus.tokenizer)))
        if work_path(corpus).exists() or plan.is_prepared():
            return
    own = folder.with_name(f"{folder.name}.{name_process(os.getpid())}")
    try:
        texts = _read_texts(corpus, on_error)
        trained = train_tokenizer(texts, vocabulary_size, own, or_fewer=or_fewer)
        if is_there and trained.read_bytes() != path.read_bytes():
            hint = "data may depend on it: use it with --tokenizer, or pass --overwrite"
            raise DataError(f"a different tokenizer exists already: {path}", hint)
        folder.mkdir(parents=True, exist_ok=True)
        trained.replace(path)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _read_texts(corpus: Corpus, on_error: OnError) -> Iterator[str]:
    result = UnitResult(steps=count_steps(corpus.document_steps))
    places: list[str] = []
    has_text = False

    def set_aside(fault: Fault) -> None:
        if on_error == "stop":
            raise fault.to_error()
        if len(places) < PLACES_PER_KIND:
            places.append(fault.render(0))

    unit = [Segment(path, 0, path.stat().st_size) for path in find_files(corpus.inputs)]
    for _, texts, _, _ in read_unit(corpus, unit, result, set_aside):
        result.documents += len(texts)
        has_text = has_text or any(texts)
        yield from texts
    if not has_text:
        raise empty_corpus(result.documents, result.steps, places)


def record_tokenizer(corpus: Corpus, vocabulary: Vocabulary) -> TokenizerRecord:
    """Describes the tokenizer of a corpus."""
    return TokenizerRecord(
        name=tokenizer_name(corpus.tokenizer),
        fingerprint=vocabulary.fingerprint,
        vocabulary_size=len(vocabulary.tokens),
        eod_id=vocabulary.eod_id,
        special_tokens=corpus.special_tokens,
    )


def _enter(folder: WorkFolder, plan: PreparationPlan, overwrite: bool) -> None:
    """Makes the work folder, or takes up the one that is there if it is of the same work."""
    if not overwrite and not folder.path.exists() and plan.is_prepared():
        return  # finished by somebody else just now
    folder.create(plan.text)
    try:
        begun = _read_identity(folder)
        if begun is None:
            return
        if not overwrite and plan.identity.differs_in_contents(begun):
            n_done = folder.replace_plan(plan.text, [*chain(*plan.stages)])
            message = "inputs changed since the work started: keeping %d of %d units"
            _log.warning(message, n_done, len(plan.units))
        else:
            hint = "pass --overwrite to start over and discard the other work"
            plan.identity.check_equal(begun, f"{folder.path} was begun", hint)
    except DataError:
        if not overwrite:
            raise
        folder.remove()
        folder.create(plan.text)
    with suppress(FileNotFoundError):
        folder.clear()


def _read_identity(folder: WorkFolder) -> Identity | None:
    try:
        return msgspec.json.decode(folder.read_plan(), type=Identity)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise DataError(
            f"{folder.path}/plan.json is not a plan of this version of Trainyard: {error}",
            "pass --overwrite to start over",
        ) from error


def _check_output(plan: PreparationPlan, overwrite: bool) -> None:
    """Finds out before the work what would spoil its end."""
    folder = Path(plan.outputs[0].prefix).parent
    for item in map(Path, plan.corpus.inputs):
        if item.is_dir() and folder.resolve().is_relative_to(item.resolve()):
            raise DataError(
                f"the output folder {folder} is inside the input folder {item}",
                "write outside it, or the next run would read this one's output",
            )
    make_output_folder(plan.corpus)
    if not overwrite and not work_path(plan.corpus).exists() and not plan.is_prepared():
        for output in plan.outputs:
            _check_absent(plan, output)
    if not plan.corpus.steps and not work_path(plan.corpus).exists():
        _check_space(folder, plan)


def make_output_folder(corpus: Corpus) -> None:
    """Makes the folder that the token files of a corpus go into.

    Raises:
        MachineError: it cannot be made or written.
    """
    folder = Path(corpus.output).parent
    with explain_failure(f"the output folder {folder} cannot be made", "choose another"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise MachineError(f"the output folder {folder} cannot be written", "choose another")


def _check_space(folder: Path, plan: PreparationPlan) -> None:
    # Half of what English text takes with GPT-2's vocabulary: below it no run can succeed. Parts
    # and the joined files are on the disk together.
    kinds = [(source, format_of(Path(source.path))) for source in plan.identity.sources]
    input_bytes = sum(source.size_bytes for source, kind in kinds if kind != ("wikipedia", ""))
    needed_bytes = input_bytes // 2
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise MachineError(
            f"{folder} has {format_bytes(free_bytes)} free; the token files of "
            f"{format_bytes(input_bytes)} of input need {format_bytes(needed_bytes)} or more "
            "while they are made",
            "free space, or write to another folder",
        )


def _check_absent(plan: PreparationPlan, output: Output) -> None:
    """Refuses to replace token files, and names the difference."""
    paths = [Path(f"{output.prefix}{suffix}") for suffix in (".bin", ".idx", ".json")]
    existing = next((path for path in paths if path.exists()), None)
    if existing is None:
        return
    hint = "pass --overwrite, or another --output"
    try:
        made = load_sidecar(output.prefix)
        made.check_sizes(output.prefix)
    except DataError as error:
        raise DataError(f"{existing} exists but is incomplete: {error.problem}", hint) from error
    wanted = msgspec.structs.replace(plan.identity, sources=plan.output_sources(output))
    recorded = {"append_eod": made.append_eod, "special_tokens": made.tokenizer.special_tokens}
    identity = msgspec.structs.replace(
        wanted,
        sources=made.sources,
        tokenizer=made.tokenizer.fingerprint,
        options={**wanted.options, **recorded},
    )
    wanted.check_equal(identity, f"{existing} was made", hint)
    if made.recipe != plan.recipe:
        problem = f"{existing} was made with other steps, other outputs or by another version"
        raise DataError(problem, hint)
