"""Prompts of our own for six tasks, so that tests and measurements need no data set."""

from __future__ import annotations

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What should I pack for a three-day walk in the hills in autumn?",
        "Explain to a ten-year-old why the moon changes its shape.",
        "Write a short and friendly email that asks a neighbour to water my plants.",
        "Give me five ideas for a quiet birthday at home.",
        "I have trouble falling asleep. What can I try tonight?",
        "My friend lost her job last week. How can I support her without being pushy?",
        "Suggest a simple dinner for four with rice, eggs and whatever is in season.",
        "Write the opening of a story about a lighthouse keeper who finds a letter in a bottle.",
    ),
    "translation": (
        "Translate into French: The train leaves at seven, and we must not be late.",
        "Translate into Spanish: My sister has bought a small house near the sea.",
        "Translate into German: Please close the window before it starts to rain.",
        "Translate into Italian: The children were playing in the garden all afternoon.",
        "Translate into English: Le chat dort sur la chaise près de la fenêtre.",
        "Translate into Portuguese: Could you tell me where the nearest pharmacy is?",
        "Translate into Dutch: We waited for an hour, but nobody came to open the door.",
        "Translate into English: Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung.",
    ),
    "summary": (
        "Summarize in two sentences: The town library was founded in 1894 by a group of teachers who lent out their "
        "own books from a back room of the school. It moved three times in its first twenty years. Today it holds "
        "ninety thousand volumes, and on most days its reading room is full of students.",
        "Summarize in one sentence: Sourdough bread rises without packaged yeast. A starter of flour and water is left "
        "to stand until wild yeasts settle in it. The baker feeds it every day, and a good starter can live for years.",
        "List the main points: Tides are caused by the pull of the moon and the sun. The moon matters more, because it "
        "is nearer. When sun and moon pull in one line the tides are strong, and when they pull at right angles the "
        "tides are weak.",
        "Summarize for a newspaper: The bridge over the river Alder will be closed from Monday. Workers found rust in "
        "two of its main cables. Buses will take the northern road, which adds twenty minutes to the trip. The mayor "
        "said that the repair will take six weeks.",
        "Summarize in plain words: A compiler translates a program from one language into another. It reads the text, "
        "builds a tree from it, checks the tree for mistakes, and writes instructions for a machine. An interpreter "
        "carries out the tree at once instead.",
        "Summarize in two sentences: The museum in the old mill opened in May. Visitors can watch how grain was "
        "ground two hundred years ago, and on Sundays the great wheel turns again. Schools come on weekdays and may "
        "bake bread in the stone oven. In its first month the museum counted three thousand guests.",
        "Summarize as three short points: Bees dance to tell each other where flowers are. The direction of the "
        "dance shows the angle to the sun, and its length shows the distance. Other bees follow the dancer in the "
        "dark hive and then fly out. On cloudy days they can still find the sun by the pattern of light in the sky.",
        "Give this text a title and a summary of one sentence: The city will plant two thousand trees along its main "
        "roads over the next three years. Shade lowers the heat in summer, and roots take up rain that would flood "
        "the streets. People who live there can choose the kind of tree and are asked to water it in the first year.",
    ),
    "question": (
        "Which planet in our solar system has the most moons?",
        "Who painted the ceiling of the Sistine Chapel, and when?",
        "What is the difference between weather and climate?",
        "Why does ice float on water?",
        "What are the three branches of government in the United States?",
        "How many bones does an adult human have?",
        "What causes the seasons on Earth?",
        "Who invented the printing press, and what did it change?",
    ),
    "math": (
        "A baker sells 24 rolls in the morning and 18 in the afternoon, each for 2 dollars. How much does he earn?",
        "A train travels 180 kilometres in 2 hours and then 120 kilometres in 1 hour. What is its average speed?",
        "Anna has three times as many apples as Ben. Together they have 48. How many apples does Ben have?",
        "Solve for x, step by step: 3x + 7 = 2x + 19.",
        "A rectangle is 12 cm long and 5 cm wide. Find its area, its perimeter and its diagonal.",
        "A shirt costs 40 dollars. It is reduced by 25 percent, and then by another 10 dollars. What does it cost now?",
        "Five workers build a wall in 12 days. How many days do three workers need at the same pace?",
        "The sum of three consecutive numbers is 72. Find the numbers, and show how you found them.",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
        "Write a Python class Stack with push, pop and peek, and raise an error when it is empty.",
        "Rewrite this with a list comprehension:\nresult = []\nfor x in range(10):\n    if x % 2 == 0:\n"
        "        result.append(x * x)",
        "Write an SQL query that lists the ten customers with the most orders.",
        "Write a JavaScript function that counts how often each word occurs in a text.",
        "Write a Python function that checks whether a text is a palindrome, ignoring spaces and capital letters.",
        "Find the mistake in this function and write it again:\ndef mean(numbers):\n    total = 0\n    for number in "
        "numbers:\n        total = number\n    return total / len(numbers)",
        "Write a Python class Account with deposit, withdraw and balance, and a test for each.",
    ),
}
