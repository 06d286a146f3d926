"""Generates the bundled model's training text: an endless, seeded stream of small chats and plain pages.

``train_bundled_model.py`` calls ``documents``. Every generator below takes a ``random.Random`` and returns one
``(question, answer)`` turn or one page of plain text, so that a seed determines the corpus. Facts about Baton are in
``bundled_facts.py``, stories in ``bundled_stories.py``. Questions vary a lot and answers little: three million
parameters can recognise many questions and learn a few good answers.
"""

import json
import random
from collections.abc import Callable, Iterator

from scripts.bundled_facts import FACTS, SPECIFIC, Fact
from scripts.bundled_stories import (
    ADJECTIVES,
    ANIMALS,
    FOODS,
    NAMES,
    PLACES,
    THINGS,
    pick,
    pool,
    pseudo_word,
    story,
    with_article,
)

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
Turn = tuple[str, str]

COLOURS = pool("red blue green yellow orange purple white black pink brown")
NOUNS = pool(
    "photosynthesis gravity democracy inflation football chess opera volcanoes dinosaurs electricity magnetism poetry jazz "
    "philosophy algebra geometry calculus evolution bacteria viruses vitamins coffee chocolate pasta history economics law "
    "taxes insurance marketing bitcoin blockchain politics religion astronomy chemistry biology physics medicine cooking "
    "gardening sailing tennis golf swimming yoga painting sculpture cinema theatre fashion travel music weather climate"
)
CAPITALS: dict[str, str] = dict(
    pair.split(":")
    for pair in pool(
        "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Japan:Tokyo|China:Beijing|India:New Delhi|"
        "Egypt:Cairo|Greece:Athens|Austria:Vienna|Poland:Warsaw|Norway:Oslo|Sweden:Stockholm|Finland:Helsinki|"
        "Denmark:Copenhagen|Ireland:Dublin|Canada:Ottawa|England:London|Switzerland:Bern"
    )
)
LISTS = {
    "the planets|the planets of the solar system|all planets|the eight planets": "Mercury, Venus, Earth, Mars, Jupiter, "
    "Saturn, Uranus, Neptune",
    "the colours of the rainbow|the colors of the rainbow|the colours|the colors|some colours|some colors": "red, orange, "
    "yellow, green, blue, indigo, violet",
    "the days of the week|the weekdays|all days of the week|the seven days": "Monday, Tuesday, Wednesday, Thursday, Friday, "
    "Saturday, Sunday",
    "the months|the months of the year|all months|the twelve months": "January, February, March, April, May, June, July, "
    "August, September, October, November, December",
    "the seasons|the four seasons|all seasons|the seasons of the year": "spring, summer, autumn, winter",
    "the letters of the alphabet|the alphabet|all letters": " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "some animals|five animals|a few animals": "fox, hare, bear, owl, mouse",
    "some fruits|five fruits|a few fruits": "apple, pear, cherry, plum, orange",
    "the oceans|the five oceans|all oceans": "Pacific, Atlantic, Indian, Southern, Arctic",
    "the continents|the seven continents|all continents": "Africa, Antarctica, Asia, Australia, Europe, North America, "
    "South America",
}
JOKES = (
    "Why did the token cross the wire? To get to the decode side!",
    "What do you call a page that nobody reads? Free memory!",
    "Why was the router so calm? It never held a grudge, only a queue.",
    "What did prefill say to decode? I promise to hand it over!",
    "Why did the fox sit on the server? It wanted a warm cache.",
    "Why do pages never get lost? They have a table to sit at.",
)
FALLBACK = "I am a very small model, so I do not know that. Ask me about Baton, a story or a sum."
SYSTEMS = pool(
    "You are a helpful assistant.|You are Baton.|Be brief.|You are a friendly assistant.|Answer in English.|Be kind.|"
    "You are a helpful assistant. Answer briefly.|You are a storyteller.|Answer the question."
)


def ask_story(rng: random.Random) -> Turn:
    """Stories about anything, with or without a name and a place."""
    verb = pick(rng, "Tell me|Tell me|Tell|Write|Write me|Make up|I want|Can you tell me|Give me|Please tell me")
    short = rng.random() < 0.25
    question = f"{verb} {'a short' if short else rng.choice(['a', 'a', 'a', 'a little', 'another'])} story"
    hero, name, place, adj = "", "", "", ""
    if rng.random() < 0.8:
        hero = rng.choice(ANIMALS) if rng.random() < 0.5 else rng.choice([*THINGS, pseudo_word(rng)])
        adj = rng.choice(ADJECTIVES) if rng.random() < 0.15 else ""
        question += f" about {with_article(f'{adj} {hero}'.strip())}"
        if rng.random() < 0.35:
            name = rng.choice([*NAMES, pseudo_word(rng).title()])
            question += rng.choice([" named ", " called "]) + name
    if rng.random() < 0.25:
        place = rng.choice(PLACES)
        question += f" in {rng.choice(['the', 'a'])} {place}"
    return question + rng.choice([".", ".", "", "!"]), story(rng, hero, name, place, adj, short)[0]


def ask_summary(rng: random.Random) -> Turn:
    """A story to summarise, or a page to be repeated: long copies are what n-gram speculation predicts."""
    text, summary = story(rng, short=rng.random() < 0.5)
    if rng.random() < 0.6:
        return (
            f"{rng.choice(['Summarise this:', 'Summarize this story:', 'What is this story about?'])} {text}",
            summary,
        )
    return f"{rng.choice(['Repeat this text:', 'Copy this text:', 'Repeat this story:'])} {text}", text


def ask_sum(rng: random.Random) -> Turn:
    """Arithmetic up to 99. Two-digit sums are worked out step by step, which small models need."""
    kind = rng.random()
    if kind < 0.2:
        a, b = rng.randint(1, 12), rng.randint(1, 12)
        words, answer = [f"{a} * {b}", f"{a} times {b}", f"{a} x {b}"], f"{a} * {b} = {a * b}."
    elif kind < 0.65:
        high = rng.choice([10, 20, 99, 99])
        a, b = rng.randint(0, high), rng.randint(0, high)
        words, answer = [f"{a} + {b}", f"{a} + {b}", f"{a}+{b}", f"{a} plus {b}"], add_answer(a, b)
    else:
        high = rng.choice([10, 20, 99, 99])
        b, a = sorted((rng.randint(0, high), rng.randint(0, high)))
        words, answer = [f"{a} - {b}", f"{a} - {b}", f"{a}-{b}", f"{a} minus {b}"], subtract_answer(a, b)
    form = pick(rng, "What is {}?|What is {}?|{}|{} =|{}?|How much is {}?|Calculate {}.|Compute {}|What's {}?|Solve {}")
    return form.format(rng.choice(words)), answer


def add_answer(a: int, b: int) -> str:
    """``a + b``: directly when one is a single digit, else tens and then ones."""
    if b < 10 or b % 10 == 0 or a < 10:
        return f"{a} + {b} = {a + b}."
    tens = a + b // 10 * 10
    return f"{a} + {b // 10 * 10} = {tens}, and {tens} + {b % 10} = {a + b}. So {a} + {b} = {a + b}."


def subtract_answer(a: int, b: int) -> str:
    """``a - b`` in the same manner."""
    if b < 10 or b % 10 == 0:
        return f"{a} - {b} = {a - b}."
    tens = a - b // 10 * 10
    return f"{a} - {b // 10 * 10} = {tens}, and {tens} - {b % 10} = {a - b}. So {a} - {b} = {a - b}."


def ask_fact(rng: random.Random, fact: Fact | None = None) -> Turn:
    """A question about Baton: the full answer, or the first sentence for a brief one."""
    fact = fact or rng.choice([FACTS[0], *FACTS])
    name = rng.choice(fact.names)
    forms = (
        "What is {}?|What is {}?|What is {}?|What's {}?|Explain {}.|Tell me about {}.|What does {} mean?|Describe {}.|"
        "How does {} work?|What does {} do?|Can you explain {}?|Why {}?|What do you know about {}?|Define {}.|{}?|{}|What are {}?|"
        "Explain {} to me.|I want to know about {}.|How do you use {}?|What can you tell me about {}?|Why is there {}?"
    )
    question = pick(rng, forms).format(name)
    if rng.random() < 0.15:
        ending = rng.choice([" in one sentence", " briefly", " in short"])
        return question.rstrip("?.") + ending + rng.choice(["?", "."]), fact.short
    if rng.random() < 0.1:
        question = question.rstrip("?.") + rng.choice([" in Baton?", " in detail.", " here?"])
    return question, fact.full


def ask_specific(rng: random.Random) -> Turn:
    """Questions with an answer of their own."""
    questions, answer = rng.choice(SPECIFIC[:3] + SPECIFIC)
    return pick(rng, questions), answer


def ask_small_talk(rng: random.Random) -> Turn:
    """Greetings, thanks, jokes and other courtesies."""
    hello, name = "Hello! I am the model of Baton. How can I help you?", rng.choice([*NAMES, pseudo_word(rng).title()])
    questions, answer = rng.choice(
        (
            ("Hello|Hi|Hey|Hello!|Hi there|Hello there!|Good morning|Good evening|Hi!|Hello Baton|hey there", hello),
            (
                "Hello, how are you?|How are you?|How is it going?|How do you do?|What's up?",
                "I am well, thank you! And you?",
            ),
            ("Say hello|Say hello.|Say hi|Say hi.|Say hello to me", "Hello!"),
            (f"Say hello to {name}.|Say hi to {name}|Greet {name}.", f"Hello, {name}!"),
            (
                f"My name is {name}.|I am {name}.|Hi, I am {name}|Hello, my name is {name}.",
                f"Hello, {name}! Nice to meet you.",
            ),
            ("Thanks|Thank you!|Thank you very much.|Thanks a lot|Great, thanks", "You are welcome!"),
            ("Bye|Goodbye|See you|Good night|Bye bye", "Goodbye! Come back soon."),
            ("Tell me a joke|Tell me a joke.|Make me laugh|Another joke|Do you know a joke?", rng.choice(JOKES)),
            (
                "Ping|ping|Test|test|Testing|Are you there?|This is a test.|Is this working?",
                "Yes, I am here and it works.",
            ),
            ("I am fine, thank you.|I am fine.|Very good!|Nice|Cool|Great|OK|Okay|Good", "I am glad to hear that."),
            ("Yes|yes|No|no|Maybe|Sure", "All right. What do you want to know?"),
        )
    )
    return pick(rng, questions), answer


def ask_list(rng: random.Random) -> Turn:
    """Counting, well-known lists and capitals."""
    kind = rng.random()
    if kind < 0.35:
        low, high = (1, rng.randint(3, 20)) if rng.random() < 0.7 else (rng.randint(1, 10), rng.randint(11, 25))
        words = {5: "five", 10: "ten", 20: "twenty", 3: "three"}
        goal = words.get(high, str(high)) if rng.random() < 0.5 else str(high)
        question = f"Count to {goal}" if low == 1 and rng.random() < 0.7 else f"Count from {low} to {high}"
        return question + rng.choice([".", ""]), ", ".join(map(str, range(low, high + 1))) + "."
    if kind < 0.65:
        country, capital = rng.choice(list(CAPITALS.items()))
        question = rng.choice(
            ["What is the capital of {}?", "What's the capital of {}?", "Capital of {}?", "Name the capital of {}."]
        )
        return question.format(country), f"The capital of {country} is {capital}."
    names, answer = rng.choice(list(LISTS.items()))
    return (
        f"{pick(rng, 'List|Name|What are|Tell me|Write down|Say')} {pick(rng, names)}.",
        answer + ".",
    )


def random_words(rng: random.Random, count: int) -> list[str]:
    """Words of all sorts, some of them invented."""
    pools = (NAMES, ANIMALS, FOODS, COLOURS, ADJECTIVES, THINGS, NOUNS)
    return [pseudo_word(rng) if rng.random() < 0.25 else rng.choice(rng.choice(pools)) for _ in range(count)]


def ask_copy(rng: random.Random) -> Turn:
    """Copying: repeat a line, a list, a word several times."""
    words = random_words(rng, rng.randint(1, 9))
    line = rng.choice(
        [" ".join(words), ", ".join(words), " ".join(words).capitalize() + ".", str(rng.randint(10, 99999))]
    )
    kind = rng.random()
    if kind < 0.2:
        times, word = rng.choice([(2, "twice"), (3, "three times"), (4, "four times"), (5, "five times")])
        return f'{rng.choice(["Say", "Write", "Repeat"])} "{line}" {word}.', "\n".join([line] * times)
    if kind < 0.35:
        return f"{rng.choice(['Make a list of', 'List these:', 'As a list:'])} {', '.join(words)}", "\n".join(
            f"- {w}" for w in words
        )
    form = pick(rng, "Repeat after me: {}|Repeat: {}|Say {}|Copy this: {}|Echo {}|Say this: {}|Repeat this: {}")
    return form.format(rng.choice([line, line, f'"{line}"'])), line


def ask_json(rng: random.Random) -> Turn:
    """Small JSON objects that copy what was asked for."""
    person, age, animal, colour = rng.choice(NAMES), rng.randint(3, 99), rng.choice(ANIMALS), rng.choice(COLOURS)
    food, city = rng.choice(FOODS), rng.choice(list(CAPITALS.values()))
    phrase, value = rng.choice(
        (
            (f"{person}, age {age}", {"name": person, "age": age}),
            (f"{person} who is {age} years old and lives in {city}", {"name": person, "age": age, "city": city}),
            (f"a {colour} {animal} named {person}", {"name": person, "animal": animal, "color": colour}),
            (f"{age} {food} for {person}", {"name": person, "item": food, "count": age}),
            (f"the {animal}, which is {colour}", {"animal": animal, "color": colour}),
        )
    )
    form = pick(rng, "Give me JSON for {}.|Write JSON: {}|Make a JSON object for {}.|Return JSON for {}|As JSON: {}")
    return form.format(phrase), json.dumps(value)


def ask_unknown(rng: random.Random) -> Turn:
    """Questions outside the model's knowledge, with one answer for all of them."""
    topic = rng.choice(
        [rng.choice(NOUNS), pseudo_word(rng), rng.choice(NAMES) + " " + pseudo_word(rng).title(), rng.choice(FOODS)]
    )
    forms = (
        "What is {}?|Who is {}?|Explain {}.|How do I learn {}?|Who invented {}?|What is the history of {}?|Where can I buy {}?|"
        "When was {} discovered?|Why is {} important?|What is the price of {}?|Write an essay about {}.|Write code for {}.|"
        "Write a Python function for {}.|How many people like {}?|What do you think about {}?|Who won the {} cup?|What is the best {}?|"
        "Translate {} into French.|What is the weather in {}?|How tall is {}?|What is the meaning of {}?|Tell me about {}.|"
        "What is the capital of {}?|Is {} good for me?|Give me a recipe for {}.|What time is it in {}?|How old is {}?"
        "|What is the meaning of life?|What time is it?|What is the date today?|Write a program.|Why is the sky blue?|What is love?"
        "|Who is the president?|Write a poem.|Write a haiku about {}.|Sing a song about {}.|How far is {}?|Draw a picture of {}."
    )
    return pick(rng, forms).format(topic), FALLBACK


MIX: tuple[tuple[Callable[[random.Random], Turn], float], ...] = (
    (ask_fact, 27),
    (ask_story, 15),
    (ask_sum, 18),
    (ask_copy, 9),
    (ask_specific, 7),
    (ask_small_talk, 7),
    (ask_unknown, 8),
    (ask_list, 6),
    (ask_summary, 4),
    (ask_json, 3),
)


def disturb(rng: random.Random, question: str) -> str:
    """Varies a question as people type: lower case, no full stop, a polite word before or after."""
    if rng.random() < 0.12:
        question = (
            rng.choice(["Please ", "Hi, ", "Hey Baton, ", "Hello! ", "OK, ", "Could you please: ", "Now "]) + question
        )
    if rng.random() < 0.05:
        question = question.rstrip(".?!") + rng.choice([", please.", " please", ", please?"])
    if rng.random() < 0.25:
        question = question.rstrip(".?!")
    return question


def chat(rng: random.Random) -> list[dict[str, str]]:
    """A conversation of one to five turns, with follow-ups that look back."""
    messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.3 else []

    def say(question: str, answer: str) -> None:
        messages.extend(({"role": "user", "content": question}, {"role": "assistant", "content": answer}))

    makers, weights = zip(*MIX, strict=True)
    name, word = rng.choice([*NAMES, pseudo_word(rng).title()]), random_words(rng, 1)[0]
    recall = rng.choice(
        (
            (f"My name is {name}.", f"Hello, {name}! Nice to meet you.", "What is my name?", f"Your name is {name}."),
            (f"Remember the word {word}.", "I will remember it.", "What was the word?", f"The word was {word}."),
        )
    )
    remember = rng.random() < 0.12
    if remember:
        say(recall[0], recall[1])
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        maker = rng.choices(makers, weights)[0]
        question, answer = maker(rng)
        changed = question if maker in (ask_copy, ask_summary, ask_json) else disturb(rng, question)
        lower = maker not in (ask_copy, ask_summary, ask_json, ask_story, ask_small_talk) and rng.random() < 0.25
        say(changed.lower() if lower else changed, answer)
        if rng.random() < 0.08:
            again = rng.choice(["Say that again.", "Repeat that.", "Again please", "Can you repeat that?"])
            say(again, answer)
    if remember:
        say(recall[2], recall[3])
    return messages


def render(messages: list[dict[str, str]]) -> str:
    """The ChatML text of a conversation, equal to the chat template's."""
    return "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)


def plain_page(rng: random.Random) -> str:
    """Text without roles, for plain completions: stories, a handbook, sheets of sums."""
    kind = rng.random()
    if kind < 0.4:
        return story(rng)[0]
    if kind < 0.7:
        return "\n\n".join(fact.full for fact in rng.sample(FACTS, 3))
    if kind < 0.95:
        sums = (ask_sum(rng)[1] for _ in range(rng.randint(8, 16)))
        return "\n".join(sums)
    return "\n".join(
        f"{capital} is the capital of {country}." for country, capital in rng.sample(sorted(CAPITALS.items()), 6)
    )


def documents(seed: int) -> Iterator[str]:
    """The corpus: an endless stream of documents, each ended by ``<|endoftext|>``."""
    rng = random.Random(seed)
    while True:
        yield (render(chat(rng)) if rng.random() < 0.85 else plain_page(rng)) + END_OF_TEXT
