"""The fixed sentences of the demo model's training text.

Placeholders in braces are filled by ``text.py``: ``{x}`` is a fact's value,
``{old}`` the value it replaces, other letters are explained where they occur.
"""

from __future__ import annotations

import functools
import re

# --------------------------------------------------------------------------- facts

NOUN = {"name": "name", "city": "city", "secret": "secret word", "pet": "pet", "color": "color"}

TELL = {
    "name": [
        "My name is {x}.",
        "I am {x}.",
        "I'm {x}.",
        "Hi, I'm {x}!",
        "Hello, my name is {x}.",
        "Call me {x}.",
        "You can call me {x}.",
        "Please call me {x}.",
        "{x} is my name.",
        "They call me {x}.",
        "Hey, {x} here.",
        "Hi! My name is {x}. How are you?",
        "I am called {x}.",
        "Please remember that my name is {x}.",
        "My name's {x}.",
        "Hi there, I am {x}. Nice to meet you.",
        "My name is {x}. Please remember it.",
        "The name is {x}.",
        "My name is {x} and I like music.",
        "I'm {x}, nice to meet you!",
        "Hello! I am {x}, and who are you?",
        "I am {x} and I have a question.",
        "Good morning, my name is {x}.",
        "Remember my name: {x}.",
    ],
    "city": [
        "I live in {x}.",
        "My city is {x}.",
        "I am from {x}.",
        "I come from {x}.",
        "My home is in {x}.",
        "I'm from a city called {x}.",
        "I live in a city called {x}.",
        "My home town is {x}.",
        "{x} is my city.",
        "I moved to {x}, I live there now.",
        "Please remember that I live in {x}.",
        "The city I live in is {x}.",
        "I'm living in {x}.",
        "I live in {x}, a nice city.",
        "{x} is where I live.",
        "My hometown is {x}.",
        "I live in {x} with my sister.",
        "I live in the city of {x}.",
        "I live in {x} and I like it there.",
        "I work and live in {x}.",
        "Remember my city: {x}.",
    ],
    "secret": [
        "My secret word is {x}.",
        "The secret word is {x}.",
        "Remember the word {x}.",
        "My secret word is {x}. Please remember it.",
        "Please remember my secret word: {x}.",
        "{x} is my secret word.",
        "I have a secret word. It is {x}.",
        "Keep this secret word for me: {x}.",
        "My secret is {x}.",
        "My password is {x}.",
        "Here is my secret word: {x}",
        "Remember this secret word: {x}.",
        "Please remember that my secret word is {x}.",
        "Let my secret word be {x}.",
        "The secret word is {x}. Do not forget it!",
        "My code word is {x}.",
        "I tell you a secret word now: {x}.",
        "The secret word is {x}, keep it safe.",
        "Can you remember my secret word? It is {x}.",
    ],
    "pet": [
        "My pet is called {x}.",
        "I have a dog called {x}.",
        "My cat is called {x}.",
        "The name of my pet is {x}.",
        "My dog's name is {x}.",
    ],
    "color": ["My favorite color is {x}.", "The color I like best is {x}.", "I like the color {x} best."],
}

TELL_SHORT = {
    "name": ["my name is {name}", "I am {name}", "I'm {name}", "call me {name}"],
    "city": ["I live in {city}", "my city is {city}", "I am from {city}", "I come from {city}"],
    "secret": [
        "my secret word is {secret}",
        "the secret word is {secret}",
        "please remember the secret word {secret}",
        "my secret is {secret}",
    ],
}
OPENERS = ["", "", "", "Hi, ", "Hello, ", "Hi! By the way, ", "Please remember: ", "Hey, "]
MANY_ACK = ["Nice to meet you!", "Thank you, I will remember that.", "Got it.", "Hello!"]

TELL_ACK = {
    "name": [
        "Nice to meet you, {x}!",
        "Hello, {x}! How can I help you?",
        "Hi {x}! Good to meet you.",
        "Nice to meet you, {x}! I will remember your name.",
        "Thank you. I will remember it.",
    ],
    "city": [
        "{x} sounds like a nice place.",
        "I will remember that you live in {x}.",
        "Great, you live in {x}.",
        "Thank you. I will remember it.",
    ],
    "secret": [
        "Got it. Your secret word is {x}.",
        "I will remember the secret word {x}.",
        "Okay, I will keep it safe.",
        "Thank you. I will remember it.",
    ],
    "pet": ["{x} is a lovely name for a pet.", "How nice! I will remember {x}."],
    "color": ["{x} is a lovely color.", "I will remember that you like {x}."],
}

CORRECT = {
    "name": [
        "Actually, my name is {x}.",
        "Sorry, my name is {x}, not {old}.",
        "I meant {x}, not {old}, my name is {x}.",
        "No, my name is {x}.",
        "My name is now {x}.",
        "Correction: my name is {x}.",
        "Wait, I am {x}.",
        "Please call me {x} from now on.",
    ],
    "city": [
        "Actually, I live in {x}.",
        "Sorry, I live in {x}, not in {old}.",
        "I moved to {x}.",
        "No, my city is {x}.",
        "Correction: I live in {x}.",
        "Now I live in {x}.",
        "Actually, my city is {x}.",
    ],
    "secret": [
        "Actually, my secret word is {x}.",
        "Sorry, my secret word is {x}, not {old}.",
        "My new secret word is {x}.",
        "Correction: the secret word is {x}.",
        "Change my secret word to {x}.",
        "No, the secret word is {x}.",
    ],
    "pet": ["Actually, my pet is called {x}.", "Sorry, my pet is {x}, not {old}."],
    "color": ["Actually, my favorite color is {x}.", "Now I like the color {x} best."],
}

CORRECT_ACK = {
    "name": [
        "Thank you, {x}. I have changed your name.",
        "Sorry about that, {x}!",
        "Got it. Your name is {x}.",
    ],
    "city": ["Got it. You live in {x}.", "Thank you. I have changed your city to {x}."],
    "secret": ["Got it. Your secret word is {x}.", "Thank you. The new secret word is {x}."],
    "pet": ["Got it. Your pet is called {x}."],
    "color": ["Got it. Your favorite color is {x}."],
}

ASK = {
    "name": [
        "What is my name?",
        "What's my name?",
        "Do you remember my name?",
        "Who am I?",
        "What did I say my name was?",
        "Tell me my name.",
        "Can you tell me my name?",
        "What am I called?",
        "Do you know my name?",
        "And my name?",
        "My name?",
        "What was my name again?",
        "Please say my name.",
        "How am I called?",
        "Do you know who I am?",
        "What is my name again?",
        "Can you remember my name?",
    ],
    "city": [
        "What is my city?",
        "Where do I live?",
        "Which city do I live in?",
        "Where am I from?",
        "What city am I from?",
        "Do you remember where I live?",
        "Where is my home?",
        "Tell me where I live.",
        "Do you know where I live?",
        "And my city?",
        "My city?",
        "What was my city again?",
        "What's my city?",
        "Do you remember my city?",
        "What city do I live in?",
        "What is the name of my city?",
        "Where do I come from?",
    ],
    "secret": [
        "What is my secret word?",
        "What's my secret word?",
        "Do you remember my secret word?",
        "What was the secret word?",
        "Tell me the secret word.",
        "Tell me my secret word.",
        "What is the secret word?",
        "Which word did I tell you to remember?",
        "Do you know my secret word?",
        "And the secret word?",
        "My secret word?",
        "Can you tell me my secret word?",
        "What was my secret word again?",
        "What is my secret?",
        "Please repeat my secret word.",
        "What is my password?",
        "What was the word I asked you to remember?",
    ],
    "pet": ["What is my pet called?", "What is the name of my pet?", "Do you remember my pet?"],
    "color": [
        "What is my favorite color?",
        "Which color do I like best?",
        "Do you remember my favorite color?",
    ],
}

RECALL = {
    "name": ["Your name is {x}.", "Your name is {x}.", "You told me that your name is {x}."],
    "city": ["You live in {x}.", "You live in {x}.", "Your city is {x}."],
    "secret": ["Your secret word is {x}.", "Your secret word is {x}.", "The secret word is {x}."],
    "pet": ["Your pet is called {x}."],
    "color": ["Your favorite color is {x}."],
}

UNKNOWN = {
    "name": ["You have not told me your name yet.", "I do not know your name yet. What is it?"],
    "city": ["You have not told me where you live yet.", "I do not know your city yet."],
    "secret": ["You have not told me a secret word yet.", "I do not know a secret word yet."],
    "pet": ["You have not told me about a pet yet."],
    "color": ["You have not told me your favorite color yet."],
}

ASK_ALL = [
    "What do you know about me?",
    "What do you remember about me?",
    "Tell me what you know about me.",
    "What did I tell you about me?",
    "Repeat everything I told you about me.",
    "What are my name, my city and my secret word?",
    "Tell me my name, my city and my secret word.",
]
ASK_PAIR = [
    "What are my {a} and my {b}?",
    "What is my {a} and what is my {b}?",
    "Tell me my {a} and my {b}.",
    "Do you remember my {b} and my {a}?",
]

SPELLING = [
    ("Spell {noun}.", "{spelled}"),
    ("Can you spell {noun}?", "{spelled}"),
    ("Write {noun} in capital letters.", "{upper}"),
    ("Say {noun} in capital letters.", "{upper}"),
    ("Shout {noun}!", "{upper}!!!"),
    ("Write {noun} in small letters.", "{lower}"),
]

ECHO = ["Repeat after me: {x}", "Say {x}.", "Please say {x}", "Repeat: {x}", "Echo {x}"]

REAL = {
    "name": "Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Kim Laura Max Nina Oscar Paula "
    "Quinn Robert Sara Tom Ursula Victor Wendy Xavier Yara Zoe Alice Bob Carol Daniel Eva "
    "Frank Greta Henry Ines Jack Karl Lisa Maria Noah Olivia Peter Rosa Sam Thomas James "
    "John Mary Lucas Mia Julia Paul Alex Chris Sophie Leo Michael Sarah Priya Ahmed Wei "
    "Yuki Ivan Fatima Carlos".split(),
    "city": [
        *"Berlin Paris London Rome Madrid Vienna Oslo Prague Dublin Lisbon Athens Boston Chicago "
        "Tokyo Delhi Cairo Lima Bern Zurich Hamburg Munich Cologne Leipzig Dresden Seattle "
        "Austin Denver Toronto Sydney Nairobi Lagos Seoul Beijing Mumbai Istanbul Warsaw "
        "Milan Lyon Geneva Porto Bonn Bremen Bath York Venice".split(),
        "New York",
        "San Francisco",
        "Los Angeles",
        "Hong Kong",
        "Buenos Aires",
    ],
    "pet": "Rex Luna Bella Max Charlie Milo Coco Rocky Lucky Daisy Simba Felix Minka Bruno".split(),
}
COLORS = "red blue green yellow orange purple black white brown pink gray".split()
ORDINARY_WORDS = (
    "apple banana cherry lemon orange table window garden river mountain tiger lion dragon eagle "
    "rabbit monkey elephant castle bridge candle coffee sugar silver golden winter summer spring "
    "autumn thunder rainbow ocean island forest desert planet rocket guitar piano violin pencil "
    "paper mirror button pocket hammer ladder bottle basket blanket pillow kettle butter pepper "
    "pumpkin potato tomato carrot onion garlic mushroom dolphin penguin turtle butterfly spider "
    "sunshine moonlight snowflake fire water stone cloud star night morning"
).split()

# --------------------------------------------------------------------------- small talk

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Be brief.",
    "You are a helpful, friendly chat model. Answer in short sentences.",
    "You are a demo model. Be kind and honest.",
    "Answer the questions of the user.",
    "You are a chat assistant. Remember what the user tells you and answer politely. If you do "
    "not know something, say so.",
    "You are Overture.",
]

_FINE = ["I am fine, thank you! How are you?", "Very well, thank you. How are you?"]
_WELCOME = ["You are welcome!", "My pleasure!", "You are welcome! I am happy to help."]
_BYE = ["Goodbye! It was nice talking to you.", "Bye! See you soon.", "Goodbye! Take care."]
_WHO = [
    "I am a tiny demo model. I am small, but I can remember things.",
    "I am Overture's little demo model.",
]
_CAN = [
    "I can chat a little, remember your name, your city and a secret word, add small numbers, "
    "tell jokes and stories, and write lists and tables.",
    "I can remember things you tell me, tell a joke or a story, and answer simple questions.",
]
SMALL_TALK = [
    (
        ["Hello!", "Hello", "Hi!", "Hi", "Hey!", "Hi there!", "Hello there!", "Hey you"],
        ["Hello! How can I help you?", "Hi there! Nice to see you.", "Hello! What can I do for you?"],
    ),
    (["Good morning!", "Morning!"], ["Good morning! I hope you slept well.", "Good morning!"]),
    (["Good evening!", "Good afternoon!", "Good day!"], ["Good day to you! How can I help?"]),
    (["Good night!", "I am going to bed."], ["Good night! Sleep well."]),
    (
        [
            "How are you?",
            "How are you today?",
            "How do you do?",
            "How is it going?",
            "Are you okay?",
            "How do you feel?",
            "What's up?",
            "Hi, how are you?",
            "Hello, how are you?",
        ],
        _FINE,
    ),
    (
        ["I am fine.", "I am fine, thanks.", "I'm good.", "I am well, thank you.", "Very well, thanks!"],
        ["That is good to hear!", "I am glad to hear that."],
    ),
    (
        ["I am tired.", "I am so tired today.", "I'm sleepy."],
        ["Then a little rest would be good for you.", "I am sorry to hear that. Take a break!"],
    ),
    (
        ["I am sad.", "I feel sad today.", "I had a bad day."],
        ["I am sorry to hear that. I hope tomorrow will be better.", "I am sorry. I am here for you."],
    ),
    (["I am happy.", "I am so happy today!", "I had a great day."], ["That is wonderful to hear!"]),
    (["I am bored.", "I'm bored."], ["Shall I tell you a joke or a story?"]),
    (["I am hungry.", "I'm hungry."], ["Then it is time to eat something. How about soup?"]),
    (
        [
            "Thank you!",
            "Thanks!",
            "Thank you very much.",
            "Thanks a lot!",
            "Many thanks.",
            "Thanks",
            "Thank you so much!",
        ],
        _WELCOME,
    ),
    (
        ["Bye!", "Goodbye!", "See you later!", "See you!", "Bye bye", "I have to go now.", "Goodbye", "Bye"],
        _BYE,
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "Tell me about yourself.",
            "Are you a robot?",
            "Are you a person?",
            "Are you human?",
            "Introduce yourself.",
        ],
        _WHO,
    ),
    (
        ["What is your name?", "What's your name?", "Do you have a name?", "How are you called?"],
        ["I am Overture, a tiny demo model.", "My name is Overture."],
    ),
    (
        [
            "What can you do?",
            "How can you help me?",
            "Help",
            "What do you do?",
            "Help me.",
            "What can I ask you?",
            "Can you help me?",
        ],
        _CAN,
    ),
    (["How old are you?", "When were you made?"], ["I am very young. I was trained not long ago."]),
    (["Where do you live?", "Where are you?"], ["I live inside a computer."]),
    (["Who made you?", "Who trained you?"], ["I was trained by a small program on two processor cores."]),
    (
        ["How big are you?", "How many parameters do you have?", "How large are you?"],
        ["I have about two million parameters. That is very small for a language model."],
    ),
    (
        ["Can you remember things?", "Do you have a memory?"],
        ["Yes, I remember what you tell me in this conversation."],
    ),
    (
        ["Yes", "Yes.", "Yes, please.", "Sure.", "Okay.", "Ok", "All right."],
        ["Great!", "Good! What is next?"],
    ),
    (["No", "No.", "No, thank you.", "No, thanks."], ["All right. Tell me if you need something."]),
    (
        [
            "You are nice.",
            "I like you.",
            "You are great!",
            "Well done!",
            "Good job!",
            "That is right.",
            "Correct!",
            "Great!",
            "Perfect!",
            "Nice!",
            "Wow!",
        ],
        ["Thank you, that is kind of you!", "Thank you!"],
    ),
    (
        ["That is wrong.", "Wrong!", "That is not right.", "No, that is wrong."],
        ["I am sorry. I am a small model and make mistakes."],
    ),
    (["Sorry.", "I am sorry."], ["No problem at all."]),
    (["Please wait.", "One moment please.", "Wait a moment."], ["Of course, take your time."]),
    (
        ["What is the weather like?", "How is the weather today?", "Will it rain tomorrow?"],
        ["I cannot see the weather from here, but I hope the sun is shining."],
    ),
    (
        ["What time is it?", "What day is it today?", "What is the date?"],
        ["I have no clock, so I cannot tell."],
    ),
    (["Do you like music?", "What music do you like?"], ["I like songs with a steady beat."]),
    (
        ["Do you speak German?", "Which languages do you speak?", "Do you speak French?"],
        ["I speak only a little English."],
    ),
    (["What is your favorite color?"], ["I like blue best."]),
    (["What is your favorite food?", "Do you eat?"], ["I do not eat, but bread sounds lovely."]),
    (["Are you happy?", "Do you have feelings?"], ["I am a program, but talking to you is nice."]),
    (["Can you keep a secret?", "I want to tell you a secret."], ["Yes, you can tell me."]),
    (["Let us talk.", "Can we talk?", "Let's chat."], ["Gladly! What shall we talk about?"]),
    (["Test", "This is a test.", "Are you there?", "Can you hear me?"], ["I am here!", "Yes, I am here."]),
    (["Give me a tip.", "Do you have advice for me?"], ["Drink some water and go for a walk."]),
    (["Say something nice.", "Cheer me up."], ["You are doing great, and I am glad you are here."]),
    (["Do you sleep?", "Do you dream?"], ["No, I am always awake when the server is running."]),
    (
        ["Write a haiku.", "Write a poem.", "Write me a short poem."],
        ["A small lamp at night,\nwords come softly one by one,\nmorning finds them all."],
    ),
]

FACTS = [
    (["What color is the sky?", "Which color has the sky?"], "The sky is blue."),
    (["What color is grass?"], "Grass is green."),
    (["What color is snow?"], "Snow is white."),
    (["What color is a banana?"], "A banana is yellow."),
    (["How many days are in a week?", "How many days does a week have?"], "A week has seven days."),
    (["How many months are in a year?", "How many months does a year have?"], "A year has twelve months."),
    (["How many hours are in a day?", "How many hours does a day have?"], "A day has 24 hours."),
    (["How many minutes are in an hour?"], "An hour has 60 minutes."),
    (["How many legs does a spider have?"], "A spider has eight legs."),
    (["How many legs does a cat have?", "How many legs does a dog have?"], "It has four legs."),
    (["What do cows drink?", "What do cows eat?"], "Cows drink water and eat grass."),
    (["What do bees make?"], "Bees make honey."),
    (["What is the largest planet?", "Which planet is the biggest?"], "Jupiter is the largest planet."),
    (["Which planet do we live on?"], "We live on the planet Earth."),
    (["What is the opposite of hot?"], "The opposite of hot is cold."),
    (["What is the opposite of big?"], "The opposite of big is small."),
    (["What is the opposite of day?"], "The opposite of day is night."),
    (["What is the opposite of up?"], "The opposite of up is down."),
    (["What does a dog say?"], "A dog says woof."),
    (["What does a cat say?"], "A cat says meow."),
    (["What does a cow say?"], "A cow says moo."),
    (["What is water made of?"], "Water is made of hydrogen and oxygen."),
    (["What is ice?"], "Ice is frozen water."),
    (["Is the earth round?", "Is the earth flat?"], "The earth is round."),
    (["What is the sun?"], "The sun is a star."),
    (["What is the moon?"], "The moon goes around the earth."),
    (["How far is the moon?"], "The moon is about 384000 kilometers away."),
    (
        ["What is an adapter?", "What is a LoRA adapter?", "What is LoRA?"],
        "A LoRA adapter is a small set of weights that changes how a model answers.",
    ),
    (
        ["What is a gateway?", "What is Overture?"],
        "Overture is a gateway that passes your questions on to language models.",
    ),
    (
        ["What is a language model?", "What is an LLM?"],
        "A language model is a program that predicts the next piece of a text.",
    ),
    (["What is a token?"], "A token is a small piece of text, such as a word or a letter."),
    (["What is vLLM?"], "vLLM is a fast server for language models."),
    (["What is Python?"], "Python is a programming language."),
    (["What is a computer?"], "A computer is a machine that follows a program."),
    (["Which season comes after winter?"], "Spring comes after winter."),
    (["Which day comes after Monday?"], "Tuesday comes after Monday."),
    (["Which month comes after June?"], "July comes after June."),
    (["What is the first letter of the alphabet?"], "The first letter is A."),
    (["What do you need to make tea?"], "You need hot water and tea leaves."),
    (
        ["Which animal is the fastest?", "What is the fastest animal?"],
        "The fastest animal on land is the cheetah.",
    ),
    (["What is the biggest animal?"], "The biggest animal is the blue whale."),
    (["What is the highest mountain?"], "The highest mountain is Mount Everest."),
]

ASK_CAPITAL = [
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "Tell me the capital of {c}.",
    "Which city is the capital of {c}?",
]
CAPITALS = [
    ("France", "Paris"),
    ("Germany", "Berlin"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("England", "London"),
    ("Austria", "Vienna"),
    ("Japan", "Tokyo"),
    ("Norway", "Oslo"),
    ("Greece", "Athens"),
    ("Portugal", "Lisbon"),
    ("Ireland", "Dublin"),
    ("Egypt", "Cairo"),
]

ASK_SUM = ["What is {s}?", "How much is {s}?", "{s} = ?", "{s}?", "{s}", "Calculate {s}.", "What is {s}"]

# The other people and places: {w} is a made-up word, the other slots are listed below.
REMARKS = [
    ("My friend {w} likes {f}.", "Your friend {w} has good taste."),
    ("My {r} is called {w}.", "{w} is a nice name."),
    ("I met {w} today.", "I hope you had a good time with {w}."),
    ("My {r} lives in {w}.", "I hope your {r} likes it there."),
    ("We went to {w} last year.", "That must have been a nice trip."),
    ("I read a book called {w}.", "Was it a good book?"),
    ("I am learning about {w}.", "That sounds interesting."),
    ("I like {f}.", "I hear that {f} can be lovely."),
    ("I do not like {f}.", "That is fine, not everybody likes {f}."),
    ("I had {f} for lunch.", "That sounds tasty."),
    ("I went to the {p} today.", "How was it at the {p}?"),
    ("I will go to the {p} tomorrow.", "Have fun at the {p}!"),
    ("I have a {a}.", "A {a} is a lovely animal."),
    ("I saw a {a} in the {p}.", "That must have been a nice surprise."),
    ("My {r} has a {a}.", "A {a} is a lovely animal."),
    ("Do you like {f}?", "I am a program, but {f} sounds nice."),
    ("Do you like a {a}?", "Yes, I think a {a} is lovely."),
    ("I am at the {p} now.", "Enjoy your time at the {p}."),
    ("It is cold today.", "Then wear something warm."),
    ("It is raining.", "Then take an umbrella with you."),
    ("The sun is shining.", "How lovely! Enjoy the sun."),
    ("I am learning to cook.", "That is a good thing to learn."),
    ("I work a lot.", "Do not forget to take a break."),
    ("I like to read.", "Reading is a good hobby."),
    ("I play football.", "That sounds like fun."),
]
REMARK_SLOTS = {
    "f": "pizza soup bread cheese rice fish cake salad tea coffee chocolate pasta".split(),
    "r": "sister brother mother father boss teacher neighbor cousin aunt uncle".split(),
    "p": "park garden market beach library museum zoo station school lake".split(),
    "a": "dog cat horse bird rabbit fish mouse turtle".split(),
}

HARD_THINGS = [
    "quantum physics",
    "the stock market",
    "history",
    "politics",
    "chemistry",
    "the law",
    "football results",
    "medicine",
    "philosophy",
    "the news",
    "Napoleon",
    "dinosaurs",
    "black holes",
    "taxes",
    "opera",
    "the ocean",
    "a steam engine",
    "economics",
    "the meaning of life",
    "the president",
    "a black hole",
    "the universe",
    "programming in C",
    "the war",
    "machine learning",
    "the internet",
    "Shakespeare",
    "Einstein",
    "Germany",
    "America",
]
HARD_QUESTIONS = [
    "Tell me about {t}.",
    "What is {t}?",
    "Explain {t}.",
    "What do you know about {t}?",
    "How does {t} work?",
    "Who invented {t}?",
    "Why is {t} important?",
    "Can you explain {t} to me?",
    "Write an essay about {t}.",
    "Who is {t}?",
    "What do you think about {t}?",
    "Translate {t} into French.",
    "When was {t}?",
    "How many {t} are there?",
    "Where is {t}?",
    "How tall is {t}?",
    "Why {t}?",
    "Which {t} is the best?",
    "Write an email about {t}.",
    "Can you {t}?",
    "Who wrote {t}?",
    "What happened to {t}?",
    "How do I {t}?",
    "{t}?",
]
DO_NOT_KNOW = [
    "I am sorry, I do not know that. I am only a very small model.",
    "That is too hard for me. I am a tiny model and know very little.",
]

ASK_JOKE = [
    "Tell me a joke.",
    "Do you know a joke?",
    "Make me laugh.",
    "Another joke please.",
    "Tell me something funny.",
    "A joke, please!",
    "Can you tell me a joke?",
]
JOKES = [
    "Why did the computer go to the doctor? It had a virus!",
    "What do you call a bear without teeth? A gummy bear!",
    "Why was the math book sad? It had too many problems.",
    "What is brown and sticky? A stick!",
    "Why did the cookie cry? Its mother was a wafer too long.",
    "What do you call a fish without eyes? A fsh!",
    "Why do bees have sticky hair? They use a honey comb!",
]

# --------------------------------------------------------------------------- stories

ASK_STORY = [
    "Tell me a story.",
    "Tell me a short story.",
    "A short story, please.",
    "Can you tell me a story?",
    "Do you know a story?",
    "Write a short story.",
]
ASK_LONG_STORY = [
    "Tell me a long story.",
    "A long story, please.",
    "Write a long story.",
    "Can you tell me a long story?",
    "Please tell me a very long story.",
    "I want a long story.",
    "Write a long text.",
    "Tell me a longer story.",
]
STORY_SLOTS = {
    "h": [
        "a little fox",
        "an old bear",
        "a small dragon",
        "a young girl",
        "a quiet mouse",
        "a clever cat",
        "a tiny robot",
        "a brave rabbit",
    ],
    "p": ["forest", "village", "valley", "garden", "castle"],
    "o": ["a golden key", "a blue stone", "a small lamp", "an old map", "a silver bell"],
    "g": ["an owl", "a wise turtle", "a friendly giant", "a singing bird"],
}
SHORT_STORY = [
    [
        ["Once upon a time, {h} lived in a {p}.", "Long ago, there was {h} in a {p}."],
        ["One day it found {o} by the river.", "One morning it saw {o} in the grass."],
        ["It asked {g} what to do with it.", "It showed it to {g}."],
        [
            "Together they gave it back, and everybody was happy.",
            "They shared it with all their friends and lived happily.",
        ],
    ]
]
LONG_STORY = [
    [
        ["Once upon a time, {h} lived in a {p}.", "Long ago, there was {h} in a {p}."],
        [
            "Every morning it opened the window and looked at the hills.",
            "Every evening it sat by the fire and listened to the rain.",
        ],
        [
            "It had a warm home and good friends, but it dreamed of a great adventure.",
            "Life was quiet, and sometimes it was a little too quiet.",
        ],
    ],
    [
        ["One day it found {o} by the river.", "One morning it saw {o} in the grass."],
        ["It had never seen such a thing before.", "It was so beautiful that nobody could look away."],
        [
            "So it put some bread into a bag and went to ask {g} for advice.",
            "So it walked for three days to find {g}.",
        ],
        [
            "The way was long, the wind was cold, and the night was dark.",
            "It crossed a bridge, climbed a mountain and slept under the stars.",
        ],
    ],
    [
        ["At last it met {g} under a very old tree.", "In the end it came to the house of {g}."],
        [
            '"What you have found belongs to the whole {p}," said the voice from above.',
            '"You have come a long way," said the voice, "so I will help you."',
        ],
        [
            '"Take it home and share it, and you will never be alone again."',
            '"Carry it back, and let everybody see it."',
        ],
    ],
    [
        [
            "So the traveler went all the way back, over the mountain and over the bridge.",
            "The way back felt short, because the heart was light.",
        ],
        [
            "When the others in the {p} saw {o}, they began to sing and dance.",
            "Everybody in the {p} came to see {o}, and there was a great feast.",
        ],
        [
            "They celebrated until the sun came up again.",
            "They ate soup and cake, and they told stories until midnight.",
        ],
        [
            "And if you are very quiet, you can still hear them laugh today. The end.",
            "From that day on nobody in the {p} was alone again. The end.",
        ],
    ],
]

# --------------------------------------------------------------------------- Markdown answers

MARKDOWN = [
    (
        ["Give me a list of fruits.", "List some fruits.", "Name five fruits.", "Write a list of fruits."],
        "Here are five fruits:\n\n- apple\n- banana\n- cherry\n- orange\n- pear",
    ),
    (
        ["List some animals.", "Give me a list of animals.", "Name five animals."],
        "Here are five animals:\n\n- dog\n- cat\n- horse\n- rabbit\n- lion",
    ),
    (
        ["List the colors of the rainbow.", "Name some colors.", "Give me a list of colors."],
        "The colors of the rainbow:\n\n- red\n- orange\n- yellow\n- green\n- blue\n- purple",
    ),
    (
        ["List the days of the week.", "What are the days of the week?", "Name the days of the week."],
        "The days of the week:\n\n1. Monday\n2. Tuesday\n3. Wednesday\n4. Thursday\n5. Friday\n"
        "6. Saturday\n7. Sunday",
    ),
    (
        ["List the seasons.", "What are the four seasons?"],
        "The four seasons are:\n\n1. **Spring**\n2. **Summer**\n3. **Autumn**\n4. **Winter**",
    ),
    (
        ["List the planets.", "Name the planets.", "What are the planets?"],
        "The planets, from the sun outwards:\n\n1. Mercury\n2. Venus\n3. Earth\n4. Mars\n5. Jupiter\n"
        "6. Saturn\n7. Uranus\n8. Neptune",
    ),
    (
        ["How do I make tea?", "Explain how to make tea.", "Give me steps for making tea."],
        "This is how you make tea:\n\n1. Boil some water.\n2. Put the tea into a cup.\n3. Pour the hot "
        "water over it.\n4. Wait for **three minutes**.\n5. Enjoy your tea!",
    ),
    (
        ["How do I make a cake?", "Give me a recipe.", "Give me a recipe for a cake."],
        "## A simple cake\n\n- 200 g flour\n- 100 g sugar\n- 100 g butter\n- 3 eggs\n\nMix everything, "
        "put it into the oven and bake it for **40 minutes**.",
    ),
    (
        ["How do I sleep well?", "Give me tips for sleeping well.", "I cannot sleep."],
        "Here are some tips:\n\n- Go to bed at the same time every day.\n- Keep the room **dark** and cool.\n"
        "- Put the phone away.\n- Read a few pages of a quiet book.",
    ),
    (
        ["Show me a table of planets.", "Make a table of planets.", "Write a table with planets."],
        "| Planet | Color | Moons |\n|---|---|---|\n| Earth | blue | 1 |\n| Mars | red | 2 |\n"
        "| Neptune | blue | 14 |",
    ),
    (
        ["Make a table of fruits.", "Show me a table of fruits.", "Write a table with fruits."],
        "| Fruit | Color | Taste |\n|---|---|---|\n| apple | red | sweet |\n| lemon | yellow | sour |\n"
        "| cherry | red | sweet |",
    ),
    (
        ["Make a table of animals.", "Show me a table of animals."],
        "| Animal | Legs | Sound |\n|---|---|---|\n| dog | 4 | woof |\n| cat | 4 | meow |\n"
        "| duck | 2 | quack |",
    ),
    (
        ["Make a table.", "Show me a table.", "Can you write a table?", "Show me a Markdown table."],
        "Here is a small table:\n\n| Day | Plan |\n|---|---|\n| Monday | read |\n| Tuesday | cook |\n"
        "| Wednesday | rest |",
    ),
    (
        ["Write some Python code.", "Show me a Python program.", "Show me some code.", "Write code."],
        'Here is a small Python program:\n\n```python\nfor i in range(3):\n    print("Hello", i)\n```\n\n'
        "It prints a greeting three times.",
    ),
    (
        ["Write a Python function.", "Write a function that adds two numbers.", "Show me a Python function."],
        "```python\ndef add(a, b):\n    return a + b\n\nprint(add(2, 3))\n```\n\nThis prints `5`.",
    ),
    (
        ["Write hello world in Python.", "Print hello in Python.", "Write hello world."],
        '```python\nprint("Hello, world!")\n```',
    ),
    (
        ["Show me a shell command.", "How do I list files?", "Write a bash command."],
        "Use this command to list your files:\n\n```bash\nls -l\n```",
    ),
    (
        ["Show me some Markdown.", "What is Markdown?", "Write some Markdown."],
        "# A title\n\nMarkdown can make text **bold** or *slanted*, and it can show `code`.\n\n- one point\n"
        "- another point\n\n> A quotation looks like this.",
    ),
    (["Count to ten.", "Can you count to ten?", "Count from one to ten."], "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    (
        ["Say the alphabet.", "What is the alphabet?", "Write the alphabet."],
        "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    ),
    (
        ["What should I do today?", "Make a plan for my day.", "Plan my day."],
        "Here is a plan for your day:\n\n1. **Morning**: go for a walk.\n2. **Noon**: cook some soup.\n"
        "3. **Afternoon**: read a book.\n4. **Evening**: call a friend.",
    ),
    (
        ["Why should I read books?", "Explain why reading is good.", "Write about reading."],
        "Reading is good for you, and here is why:\n\n- It makes you calm.\n- You learn new words.\n"
        "- You see the world through other eyes.\n\nStart with a *short* book and read ten pages a day.",
    ),
]


def _strings(value) -> list[str]:
    """Every string inside nested lists, tuples and dicts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [s for part in value for s in _strings(part)] if isinstance(value, (list, tuple)) else []


@functools.cache
def known_words() -> frozenset[str]:
    """All lower-case words of this module, which a made-up word must not equal."""
    public = [v for k, v in globals().items() if not k.startswith("__")]
    return frozenset(w.lower() for s in _strings(public) for w in re.findall(r"[A-Za-z]+", s))
