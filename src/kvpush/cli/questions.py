"""What the demo asks: five real questions whose prompts are of very different lengths."""

from __future__ import annotations

from dataclasses import dataclass

_LETTER = """\
To the members of the allotment association,
The winter was dry, and the well by the north gate stands lower than in any spring since it was dug. The \
committee has looked at three ways out. First, we could deepen the well by eight metres; a firm from the next \
town asks 6,400 for it and gives no guarantee that it will find water. Second, we could lay a pipe from the \
town's main along the railway path. The town would charge 11,000 once and then 1.90 for each cubic metre, and \
the work could not begin before October. Third, we could catch the rain from the roof of the new hall. The roof \
measures 420 square metres; in an average year 310 millimetres fall between March and September, so that some \
130 cubic metres could be gathered, of which perhaps a fifth is lost. Four tanks of ten cubic metres each with \
pump and filter cost 7,900, and members could set them up themselves on two weekends.
Last year we used 96 cubic metres. The treasury holds 9,300. Two members have offered a loan of 2,000 each \
without interest. The committee favours the tanks, but it wants to hear you first. Those who have plots at the \
east end remind us that their pressure is low already and would fall further if the pump stood at the hall; they \
ask for a second, smaller pump, which would cost 650. Others ask why we do not simply water less: mulch and \
evening watering saved a third in the trial plots.
Please come to the meeting on Thursday the 14th at seven in the evening in the hall. Whoever cannot come may \
give a vote in writing to Ms Okafor by Wednesday noon. Coffee is provided; cake is welcome."""

_RECIPE = """\
Here is a note from my grandmother's kitchen. Take a pound of flour, a spoon of salt, half a cube of fresh yeast \
and not quite half a litre of lukewarm water. Stir the yeast into the water, add it to the flour, and knead for \
ten minutes, until the dough no longer sticks to the bowl. Cover it and let it rise near the stove for an hour. \
Fold it twice, shape a loaf, let it rest for another half hour, and score the top. Bake it at 230 degrees for \
fifteen minutes with a cup of water on the floor of the oven, then at 200 degrees for half an hour. It is done \
when it sounds hollow from below."""


@dataclass(frozen=True, slots=True)
class Question:
    """title: what the terminal shows. prompt: what the model gets."""

    title: str
    prompt: str


QUESTIONS = (
    Question("Why is the sky blue?", "Why is the sky blue? Explain it to a child in two sentences."),
    Question(
        "Name three rivers of Europe.",
        "Which three large rivers of Europe should a traveller see, and why? Give one short sentence for each. Write "
        "for somebody who has never been to Europe, likes old towns and boats, and has a week of holidays in June.",
    ),
    Question(
        "What does this Python function do?",
        """\
What does this Python function do, and what does it return for the list [3, 1, 2]? Answer in two sentences.

def f(values):
    result = []
    for value in values:
        place = len(result)
        while place > 0 and result[place - 1] > value:
            place -= 1
        result.insert(place, value)
    return result
""",
    ),
    Question("Why the cup of water in the oven?", _RECIPE + "\n\nWhy does she put a cup of water into the oven?"),
    Question("What is this letter about?", _LETTER + "\n\nWhat is the main problem that this letter describes?"),
)
