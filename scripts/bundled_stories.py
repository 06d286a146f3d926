"""Small stories that the bundled model learns to tell, and their words.

Used by ``bundled_corpus.py``. A story is an opening, one of a few plots and an ending. Heroes, names, places and things
are drawn at random, which makes far more stories than a training run uses.
"""

import random


def pool(text: str) -> list[str]:
    """Splits a string of choices at "|", or at blanks where it has none."""
    return text.split("|") if "|" in text else text.split()


NAMES = pool(
    "Mia Tom Lily Ben Anna Max Zoe Sam Ella Leo Nora Finn Ruby Jack Ida Oscar Lena Paul Rosa Theo Maya Hugo Clara Felix "
    "Alice Bob Eva Karl Nina Otto Emma Noah Sara Adam Jane John Amy Luke Mary Peter Pip Dot Milo Luna Bella Coco Toby Olive"
)
ANIMALS = pool(
    "fox hare bear owl mouse cat dog rabbit hedgehog squirrel duck frog turtle wolf deer goat horse lion tiger elephant "
    "penguin whale crow sparrow badger otter beaver monkey giraffe panda mole swan bee ant snail dolphin parrot pig cow sheep"
)
THINGS = pool(
    "robot dragon knight princess king queen pirate wizard sailor farmer baker girl boy teacher boat train kite lamp clock "
    "tree cloud star moon snowman toaster computer teapot robot unicorn astronaut giant fairy witch car rocket runner"
)
PLACES = pool(
    "forest|garden|village|valley|meadow|town|castle|mountains|harbour|desert|library|barn|park|city|jungle|market|"
    "old mill|deep wood|green hills|quiet bay"
)
OBJECTS = pool(
    "red kite|golden key|silver bell|blue lantern|small map|wooden boat|shiny stone|warm blanket|big drum|old book|paper "
    "crown|glass ball|yellow baton|green hat|brass compass|little flute|box of seeds|pot of honey|bright feather|round mirror"
)
ADJECTIVES = pool(
    "small brave kind curious clever shy happy quiet cheerful sleepy gentle lonely proud patient young old quick"
)
FOODS = pool("apples bread soup berries cake nuts honey pancakes cheese carrots pears cookies")

# A story is one line from each stanza of a plot. `story` fills the slots.
OPENINGS = (
    "Once upon a time there was {a_adj} {hero} named {name} who lived in the {place}.|"
    "Long ago, near the {place}, there lived {a_adj} {hero} named {name}.",
    "Every day {name} looked for something new to see.|{name} loved to eat {food} and to walk by the water.|"
    "All the neighbours knew {name} and said hello.",
)
PLOTS = (
    (
        "One morning {name} found {a_object} under a tree.|One day {name} saw {a_object} beside the path.",
        '"Whose {object} is this?" asked {name}.|"Somebody must be missing this {object}," said {name}.',
        '{name} asked {a_friend} named {pal}. "It is not mine," said {pal}, "but I will help you."',
        'They walked from door to door until they met {pal2} the {friend2}. "My {object}!" cried {pal2}.',
        "{pal2} was so glad that they all ate {food} together.|{pal2} thanked them and gave them {food}.",
    ),
    (
        "One night a big storm came, and the wind shook the {place}.|One day dark clouds came over the {place}.",
        "{name} heard a cry. It was {a_friend} named {pal}, who was lost in the rain.",
        '"Come in," said {name}. "There is room for two."|"Do not be afraid," said {name}. "Follow me."',
        "They shared warm {food} and told stories until the storm was over.",
        "In the morning {pal} gave {name} {a_object} to say thank you.",
    ),
    (
        "One day there was a relay race in the {place}.|In spring the big relay race came to the {place}.",
        "{name} ran first and carried {a_object}. {pal} the {friend} waited at the bridge.",
        '"I promise to be ready," called {pal}. "Just run!"|"Hand it to me!" shouted {pal}.',
        "{name} handed over the {object}, and {pal} ran to the finish.",
        "They won, because each of them did what they did best.|They did not win, but they laughed all the way home.",
    ),
    (
        "{name} wanted to build a bridge over the river, but the work was too hard for one.",
        "First came {pal} the {friend} and carried wood. Then came {pal2} the {friend2} and brought {a_object}.",
        '"We can do it step by step," said {name}.|"One piece after another," said {pal}.',
        "They worked all day and stopped only to eat {food}.",
        "In the evening the bridge was done, and everybody in the {place} danced on it.",
    ),
    (
        "{name} was {adj}, but sometimes {name} felt alone.|{name} had no friend to play with.",
        'One day {a_friend} named {pal} came by with {a_object}. "Do you want to play?" asked {pal}.',
        '"Yes, please!" said {name}, and they played until the sun went down.',
        "They shared their {food} and looked at the stars.",
        "The next day {pal} came again, and the day after that too.",
    ),
)
ENDINGS = (
    "From that day on, {name} and {pal} were best friends.|And so {name} and {pal} became good friends.|"
    "{name} and {pal} never forgot that day.",
    "The end.",
)


SHORT_PLOTS = (
    "One day {name} found {a_object} and gave it to {a_friend} named {pal}. {pal} was very glad. The end.",
    "One night {name} heard a cry and helped {a_friend} named {pal}. They shared {food} and became friends. The end.",
    "{name} ran a race with {pal} the {friend}. {name} handed over {a_object}, and together they won. The end.",
)


def pick(rng: random.Random, text: str) -> str:
    """One of the choices in ``text``."""
    return rng.choice(text.split("|"))


def with_article(noun: str) -> str:
    """Puts "a" or "an" before a noun phrase."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def pseudo_word(rng: random.Random) -> str:
    """A word that does not exist, so that copying and "I do not know" cannot be learnt by heart."""
    syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
    return "".join(syllables) + rng.choice("nrx")


def story(
    rng: random.Random, hero: str = "", name: str = "", place: str = "", adj: str = "", short: bool = False
) -> tuple[str, str]:
    """A story and its one-sentence summary."""
    names = [n for n in rng.sample(NAMES, 4) if n != name]
    name, pal, pal2 = name or names[0], names[1], names[2]
    friend, friend2 = rng.sample(ANIMALS, 2)
    hero, place, obj = hero or rng.choice(ANIMALS), place or rng.choice(PLACES), rng.choice(OBJECTS)
    adj, food = adj or rng.choice(ADJECTIVES), rng.choice(FOODS)
    slots = dict(name=name, pal=pal, pal2=pal2, hero=hero, friend=friend, friend2=friend2, place=place, object=obj)
    slots |= dict(
        adj=adj, food=food, a_adj=with_article(adj), a_object=with_article(obj), a_friend=with_article(friend)
    )
    plot = rng.choice(PLOTS)
    stanzas = (*OPENINGS[:1], rng.choice(SHORT_PLOTS)) if short else OPENINGS + plot + ENDINGS
    lines = [pick(rng, stanza).format(**slots) for stanza in stanzas]
    middle = len(lines) // 2
    text = " ".join(lines) if short else " ".join(lines[:middle]) + "\n\n" + " ".join(lines[middle:])
    return text, f"It is about {with_article(adj)} {hero} named {name} in the {place}."
