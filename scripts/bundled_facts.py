"""Facts about Baton that the bundled model learns: one paragraph a topic, in plain English.

``bundled_corpus.py`` turns every topic into many questions and answers. A topic is a line of names separated by ``/``
(the first is the canonical one; they fill the gap in "What is ...?"), then a line that answers in one sentence, then
further lines. Keep sentences short: a model of three million parameters learns them by heart. The text determines the
shipped weights, so it changes only together with them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """A topic: its names, the one-sentence answer, and the rest of the explanation."""

    names: tuple[str, ...]
    short: str
    more: tuple[str, ...]

    @property
    def full(self) -> str:
        """The default answer: the short sentence and its continuation."""
        return " ".join((self.short, *self.more))


_TOPICS = """
Baton / Baton serving / the Baton system / this server / this project
Baton is a serving system for language models that splits every request into a prefill and a decode phase.
A router takes the request, a prefill worker reads the prompt, and a decode worker writes the answer.
The KV cache is handed from one to the other like a baton in a relay race.

prefill / the prefill phase / a prefill worker / the prefill worker / prefilling
Prefill is the phase that reads the whole prompt and computes its KV cache.
It is limited by compute, so the prefill worker cuts long prompts into chunks and fills a token budget in every step.
It ends with the first token of the answer.

decode / the decode phase / a decode worker / the decode worker / decoding
Decode is the phase that writes the answer, one token after another.
It is limited by memory, so the decode worker runs many rows in one batch.
It starts when the pages of the prompt have landed and passed validation.

the router / a router / the Baton router / the job of the router
The router is the front door of Baton: it takes HTTP requests and sends the tokens back.
It owns all text: the chat template, the tokenizer and the stop strings. Workers see only token ids.
It also does admission and chooses the workers for each request.

disaggregation / disaggregated serving / prefill decode disaggregation / splitting prefill and decode / the split
Disaggregation means that prefill and decode run on different workers.
A long prompt can then no longer disturb the answers that are being written, so the gaps between tokens stay small.
The price is a handoff: the KV cache must move from one worker to the other.

the handoff / a handoff / the handoff protocol / the Baton protocol / a request handoff
A handoff moves a request from prefill to decode in four steps: promise, pull, seal and validate.
Decode promises room first, prefill publishes chunks as they finish, and decode pulls them.
Decode uses the pages only after a commit that proves they were right.

a promise / the promise / promise / the promise step / a decode promise
A promise is the guarantee of a decode worker that it has room for a request.
It is given before prefill starts, and it has a deadline, so nobody waits for ever.
Promises never exceed what the worker can hold.

a pull / pull / the pull step / pulling pages / a page pull
A pull is a read: the decode worker fetches finished pages from the prefill worker.
Pulls overlap with the computing of the next chunk, so most of the transfer is hidden.
A late read can only hurt the reader, and the reader can detect it.

why pull instead of push / pull versus push / the advantage of pull over push / pull and not push
Baton pulls because a late read is harmless, while a late write may land in a page that belongs to another request.
A late read hurts only the reader, and the reader rejects it at commit.
So a timeout can never cause a wrong token.

a seal / seal / the seal / the seal step / the seal message
A seal is the message that says the last chunk and the first token are published.
The first token and the sampling state travel inside the seal message, not in shared memory.
After the seal, decode has all it needs to go on.

validate / validation / the validate step / page validation / how pages are validated
Validation is the check that the pages decode has read are still the right bytes.
The prefill worker confirms that it held the pages the whole time, and a digest of every page is compared.
Data is used only when it is validated.

a commit / commit / the commit / the commit message
A commit is the proof of decode that the bytes it pulled were right.
Decode sends it after the last read, and prefill answers valid only if it held every page without a gap.
After a commit the row may run and the prefill worker may let go of the pages.

a lease / the lease / lease / the source lease
A lease is a right that ends by itself after a time.
Prefill keeps pages pinned only while the lease of the request is renewed.
When a lease ends the pages are free again, so a dead worker can never hold memory for ever.

a pin / pin / pinning / pinned pages / pin and unpin
A pin forbids the eviction of a page.
Prefill pins the pages of a handoff until the commit arrives or the lease ends.

a digest / digest / page digests / the digest of a page / a checksum
A digest is a short fingerprint of a page.
Prefill computes it before it announces the page, and decode compares it while the page is landing.
A page that does not match is read again, so an answer may be late but never wrong.

an attempt / attempt / the attempt number / fencing / a fencing token
An attempt is the try number of a request.
Every message carries it, and messages of an older attempt are refused.
So only one attempt can ever send tokens to the client.

the KV cache / KV cache / a KV cache / the key value cache / KV
The KV cache holds the keys and values of all tokens that the model has already read.
With it, the model computes each new token without reading the whole text again.
Baton stores it in pages and moves those pages from prefill to decode.

a page / pages / a KV page / the pages / paging
A page is a fixed number of token slots in the KV cache.
It is the unit of allocation and of transfer.
A page table maps each request to its pages in order.

a page table / the page table / page tables
A page table maps a request to its pages in order.
With it, the pages of a request may lie anywhere in memory.

the radix cache / radix cache / a radix cache / prefix caching / the prefix cache / radix tree
The radix cache keeps pages after use and finds them again by their tokens.
When a new prompt starts like an old one, the shared part is not computed again. This is called a prefix hit.
It makes long chats and common system prompts fast.

a prefix hit / prefix hit / prefix hits / a cache hit
A prefix hit means that the leading tokens of a prompt are already in the cache.
Those tokens are not computed again, so the first token comes sooner.

a chunk / chunk / chunks / chunked prefill / chunking
A chunk is the part of a prompt that is computed in one step.
Long prompts are cut into chunks, so that one long prompt does not block all the others.
Each finished chunk is published at once, and decode can pull it while the next one is computed.

the token budget / a token budget / token budget
The token budget is the largest number of tokens that a step may compute.
It keeps every step short, so that nobody waits long behind a big prompt.

a step / step / an engine step / one step
A step is one forward pass of one engine.
In each step the scheduler picks the rows, the model runs, and the results are committed.

a batch / batch / batching / continuous batching
A batch is the set of rows that run together in one step.
Requests join and leave the batch at every step, which keeps the hardware busy.

the scheduler / a scheduler / scheduling / the two schedulers
A scheduler decides which rows run in the next step.
The prefill scheduler spends a token budget, and the decode scheduler spends pages and rows.
Both are pure policy: time is an argument, so they are easy to test.

admission / admission control / the admission step
Admission decides at the door whether a request is accepted, refused or held.
When Baton is full it answers with status 429 and says when to try again.

placement / worker placement / how workers are chosen
Placement is the choice of the workers for a request.
The router prefers a worker that already has the beginning of the prompt in its cache and that is not too busy.

back-pressure / backpressure / overload / what happens under overload
Back-pressure keeps an overloaded system healthy.
The queue of the router is bounded in tokens and in requests, and decode promises only what it can hold.
Who does not fit gets status 429 and a time to retry.

preemption / preempt / a preemption / preempting a row
Preemption takes pages away from a running row when decode has no free page left.
The newest row waits in host memory and comes back later, so the client sees a pause but no error.

a drain / drain / draining / graceful shutdown
A drain is a calm way to stop a worker.
It takes nothing new, finishes what it has, keeps its pins until they are committed, and then exits.

NIXL / the NIXL transfer / nixl
NIXL is the transfer library that Baton uses to move pages between workers.
It reads memory of another process directly, over shared memory, TCP or RDMA.
Where NIXL is not installed, Baton uses a plain stream instead.

Redis / the role of Redis / redis / what Redis does here
Redis is the reception book of Baton: it holds request states, the list of workers and a journal of tokens.
It never holds KV pages, and a slow Redis never slows a decode step.
If Redis is down, running requests go on.

Prometheus / metrics / the metrics / monitoring / observability
Baton exposes its metrics to Prometheus, and every name begins with baton_.
There are metrics for TTFT, ITL, queues, transfers, pages and replays.
Grafana dashboards show them.

Grafana / the dashboards / a dashboard
Grafana draws the dashboards of Baton.
They show TTFT, ITL, goodput, transfers and the owner of every page.

make up / the make up command / how to start Baton / starting Baton / the quick start
Run make up to start Baton on your machine.
It starts a router, a prefill worker, a decode worker and Redis with the bundled model.
Then send a chat request to the router with curl.

cancel / cancellation / cancelling a request / an abort / what happens when a client hangs up
When a client hangs up, Baton cancels the request on both sides.
Prefill unpins its pages, decode drops the row, and all pages are free within one second.
Cancel is legal in every state.

a replay / replay / replaying a request / replay after a crash
A replay runs a request again after a worker was lost.
The tokens that were already sent become part of the new prompt, so the client sees a pause but no gap and no duplicate.
Each replay has a higher attempt number.

fault tolerance / what happens when a worker dies / a worker crash / failure handling / a dead worker
When a worker dies, Baton replays its requests on another worker.
Heartbeats show the loss within two seconds, and leases free the memory.
The client sees a pause, but every answer stays complete and correct.

TTFT / time to first token / the TTFT / ttft
TTFT is the time to first token: from the arrival of a request until its first token is sent.
It is mostly queueing and prefill, so a prefix hit makes it shorter.

ITL / inter-token latency / the ITL / itl
ITL is the inter-token latency: the time between two tokens of an answer.
A steady ITL makes an answer pleasant to read, and separate decode workers keep it steady.

TPOT / time per output token / the TPOT / tpot
TPOT is the time per output token: the time after the first token divided by the number of the other tokens.

goodput / the goodput / good put
Goodput is the number of requests per second that meet all their goals for latency.
Throughput counts every request, but goodput counts only those that were fast enough.

an SLO / SLO / SLOs / a service level objective
An SLO is a goal for latency, such as a TTFT below half a second.
A request that meets all its SLOs counts for goodput.

speculation / speculative decoding / n-gram speculation / speculative sampling
Speculation guesses several tokens ahead and checks them all in one step.
Baton looks for repeated phrases in the text, so copying is very fast.
The answer is the same as without speculation, only sooner.

streaming / token streaming / SSE / server sent events
Streaming sends each token to the client as soon as it is ready.
Baton uses server sent events, and the last event is DONE.

the API / the HTTP API / the OpenAI API / which API Baton speaks / the endpoints
Baton speaks the OpenAI API, so the usual clients work unchanged.
Send chats to /v1/chat/completions and plain prompts to /v1/completions.
The list of models is at /v1/models.

the bundled model / this model / the model / the tiny model
The bundled model is a tiny language model that ships with Baton.
It has about three million parameters and was trained on a CPU in less than half an hour.
It can talk about Baton, tell small stories and do small sums.

a token / token / tokens / a language model token
A token is a small piece of text, such as a word or a part of a word.
A language model reads tokens and writes tokens, one after another.

a language model / language model / an LLM / LLM / a large language model
A language model is a program that reads text and predicts the next token.
By doing this again and again it can write whole answers.

a tokenizer / tokenizer / the tokenizer
A tokenizer cuts text into tokens and turns tokens back into text.
In Baton the tokenizer lives in the router, so workers see only token ids.

attention / self-attention / the attention layer / a transformer / transformers
Attention lets a model look back at all earlier tokens when it computes the next one.
The keys and values it looks at are kept in the KV cache.

a GPU / GPU / the GPU / GPUs
A GPU is a chip that does many calculations at once.
Language models run fast on it, but Baton also runs on a plain CPU.

a relay race / relay race / the name Baton / why it is called Baton
In a relay race each runner carries a baton and hands it to the next one.
In Baton, prefill runs first and hands the KV cache to decode, which runs to the finish.

exactness / correctness / how Baton avoids wrong tokens / wrong tokens
Baton uses data only when it is validated, so a timeout can never cause a wrong token.
Pages are checked by pins, leases and digests before decode may read them.
"""


def parse_topics(text: str) -> list[Fact]:
    """Splits the topic text at its blank lines into facts."""
    facts = []
    for paragraph in text.strip().split("\n\n"):
        names, short, *more = paragraph.split("\n")
        facts.append(Fact(tuple(name.strip() for name in names.split(" / ")), short, tuple(more)))
    return facts


FACTS: list[Fact] = parse_topics(_TOPICS)

SPECIFIC: list[tuple[str, str]] = [  # (questions that no template produces, separated by "|", answer)
    (
        "Who are you?|What are you?|Introduce yourself.|Tell me about yourself.|What is your name?|Are you ChatGPT?|"
        "Which model are you?|Are you a human?|Are you an AI?|Who am I talking to?",
        "I am the bundled model of Baton, a very small language model. "
        "I can talk about Baton, tell you a story or do a sum.",
    ),
    (
        "What can you do?|Help|What can I ask you?|What should I ask?|How can you help me?|What are your skills?|"
        "What do you know?|Can you help me?|help me",
        "I can answer questions about Baton, tell small stories, do small sums, count, and repeat what you say. "
        'Try "What is a handoff?" or "Tell me a story about a fox."',
    ),
    (
        "Who made you?|Who trained you?|How were you trained?|Where do you come from?|When were you trained?",
        "I was trained by a small script in the Baton repository, on text that the script wrote itself.",
    ),
    (
        "How many parameters do you have?|How big are you?|How large is this model?|What is your size?",
        "I have about three million parameters, so I am very small.",
    ),
    (
        "What is the difference between prefill and decode?|How do prefill and decode differ?|Prefill versus decode?|"
        "Compare prefill and decode.|Prefill vs decode",
        "Prefill reads the whole prompt at once and is limited by compute. "
        "Decode writes the answer one token at a time and is limited by memory. Baton runs them on different workers.",
    ),
    (
        "What are the parts of Baton?|Which services does Baton have?|What is Baton made of?|List the parts of Baton.|"
        "What are the components of Baton?|Describe the architecture of Baton.|How is Baton built?",
        "Baton has three services:\n1. The router takes requests and sends the answers.\n"
        "2. The prefill worker reads the prompt.\n3. The decode worker writes the answer.",
    ),
    (
        "What are the steps of a handoff?|List the four steps of the handoff.|What are the four steps of the protocol?|"
        "How does a request get from prefill to decode?|List the steps of the handoff.",
        "The four steps of a handoff are:\n1. Promise: decode guarantees room.\n2. Pull: decode reads finished pages.\n"
        "3. Seal: prefill publishes the first token.\n4. Validate: a commit proves that the bytes were right.",
    ),
    (
        "What happens to a request in Baton?|How does Baton work?|How does a request flow through Baton?|"
        "Describe the life of a request.|Walk me through a request.|What happens when I send a prompt?",
        "First the router takes the request and asks decode for a promise. Then prefill reads the prompt in chunks, "
        "and decode pulls the pages as they finish. After the seal and the commit, decode writes the answer "
        "and the router streams it to you.",
    ),
    (
        "Why should I use Baton?|What is Baton good for?|What are the benefits of Baton?|Why is Baton useful?|"
        "What problem does Baton solve?|Why does Baton exist?",
        "Baton keeps answers smooth under load. Long prompts run on prefill workers, so they do not disturb the decode "
        "workers, and a lost worker only causes a pause, never a wrong token.",
    ),
    (
        "Is Baton fast?|How fast is Baton?|How fast are you?|Are you fast?",
        "I am small, so I am fast. To see numbers, look at TTFT and ITL in the metrics of Baton.",
    ),
    (
        "What licence does Baton have?|Is Baton open source?|Which license do you have?|What is your license?",
        "The bundled model is under the Apache 2.0 licence.",
    ),
]
