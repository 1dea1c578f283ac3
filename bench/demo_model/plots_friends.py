"""Plots about how people treat each other; see plots.py for the language of the templates."""

from __future__ import annotations

from lexicon import Beat

SHARE: tuple[Beat, ...] = (
    (
        "One day, {his} {rel} gave {him} a {food}. It smelled wonderful.",
        "One morning, {hero} made a {food}. {He} put it in {his} [bag|basket] and went out.",
        "{name} loved to eat. One day {he} had a {food} all for {himself}.",
    ),
    (
        "{He} sat down {spot} and was about to [take the first bite|begin to eat].",
        '"I will eat it all by myself," thought {hero}, and {he} sat down {spot}.',
        "{He} went to {his} favourite place, {spot}, to eat in peace.",
    ),
    (
        'Then {intro2} came along. "I have not eaten all day," said {helper}. "I am so hungry."',
        'Just then, {intro2} came by. {He2} looked thin and tired. "May I have a little of your '
        '{food}?" {he2} asked.',
        '{intro2} stopped and looked at the {food}. "That smells so good," {he2} said. "I have '
        'nothing to eat today."',
    ),
    (
        '{Hero} did not want to share. "It is mine," {he} said at first. But then {he} saw how '
        "sad {helper} was.",
        "{name} looked at the {food}. There was not very much. But {helper} looked so hungry.",
        '{Hero} thought about it for a long time. "If I were hungry, I would want someone to '
        'share with me," {he} thought.',
    ),
    (
        '"Here, take half," said {hero}. They sat side by side and ate the {food} together.',
        'So {he} broke the {food} in two and gave the bigger part to {helper}. "Thank you!" said '
        "{helper}.",
        '"Come and sit with me," {he} said. "There is enough for both of us."',
    ),
    (
        "?",
        "To {his} surprise, the {food} tasted even better that way.",
        "They told each other funny stories and laughed until the sun went down.",
        "{helper} told {him} about {his2} life and {his2} big family.",
    ),
    (
        "A week later, {hero} lost {his} {thing}. {helper} heard about it, looked all day, and "
        "brought it back.",
        "Some days later, {name} fell and hurt {his} foot. It was {helper} who carried {him} home.",
        'When winter came, {hero} had nothing left to eat. Then {helper} knocked on the door. "You '
        'shared with me," {he2} said. "Now I will share with you."',
        "The next day, {helper} came back with a present. It was a {thing}, and it was for {hero}.",
    ),
    (
        "{name} learned that [kindness always comes back|sharing makes a friend|a small gift can "
        "be a big one].",
        '"I am glad I shared," thought {hero}.',
        "From then on, {hero} always shared what {he} had.",
        "After that, {name} and {name2} ate together every [day|Sunday].",
    ),
)

RACE: tuple[Beat, ...] = (
    (
        "Every year there was a big race {where}. The prize was a {thing}, and {hero} wanted to "
        "win it.",
        "One day, there was going to be a race. The winner would get a {thing}. {name} wanted it "
        "very much.",
        '"There will be a race on Sunday," said {his} {rel}. "The prize is a {thing}." {Hero} '
        "wanted to try.",
    ),
    (
        "{He} practised every morning. {He} ran up the hill and down again until {his} legs hurt.",
        "But {hero} was slow, and the others laughed. So {he} practised day and night.",
        "{He} was not the fastest, but {he} did not give up. Every day {he} ran a little farther.",
    ),
    (
        '{intro2} was in the race too. "I will win," said {helper}. "I am the fastest of all."',
        'On the day of the race, {he} stood next to {intro2}. "You will never beat me," {he2} '
        "said.",
        'The best runner was {intro2}. {He2} looked at {hero} and smiled. "Good luck," {he2} said.',
    ),
    (
        '"Ready, steady, go!" Off they went. {helper} ran in front, and {hero} ran behind.',
        "The race began. {name} ran and ran, and soon only {helper} was in front of {him}.",
        "A bell rang, and everyone started to run. {helper} was quick, but {hero} was not far "
        "behind.",
    ),
    (
        'Then {helper} tripped over a stone and fell. "My leg!" {he2} cried.',
        "Near the end, {helper} slipped in the mud and could not get up.",
        "Suddenly {helper} stopped. {He2} had stepped on a thorn, and it hurt very much.",
    ),
    (
        "{Hero} could have run past and won. But {he} stopped and helped {helper} to stand.",
        '{name} saw the finish line. {He} saw {helper} too. "I will not leave you here," {he} '
        "said.",
        "{name} looked at the finish line, then at {helper}. {He} turned around and went back to "
        "help.",
    ),
    (
        "They walked over the line together, arm in arm. Everyone cheered.",
        "{helper} leaned on {him}, and they crossed the line side by side. They were last, but "
        "everybody clapped.",
        "Slowly they went on together. Someone else had won, but {hero} did not mind.",
    ),
    (
        'The judge gave {hero} the {thing}. "This is for the kindest runner," the judge said.',
        '"You gave up the prize for me," said {helper}. The next day {he2} brought {him} a {thing} '
        "that {he2} had made.",
        "In the end, the {thing} was given to both of them, and they took turns with it.",
    ),
    (
        "{name} learned that [being kind is better than being first|a friend is the best prize].",
        "From that day on, {name} and {name2} always ran together.",
        '"Next year we will run as a team," said {helper}, and {hero} laughed.',
    ),
)

FEAR: tuple[Beat, ...] = (
    (
        "But {hero} had a secret. {He} was afraid of {fear}.",
        "{name} was good at many things, but {he} was very much afraid of {fear}.",
        "There was only one thing that scared {him}, and that was {fear}.",
    ),
    (
        'When the others played, {he} stayed at home with {his} {thing}. "I am just tired," {he} '
        "said.",
        "{He} never told anyone. {He} only held {his} {thing} and hoped that nobody would ask.",
        '"What if something bad happens?" {he} always thought. Then {he} hugged {his} {thing}.',
    ),
    (
        'One day, {intro2} asked, "Why do you not come with us?" {name} looked at the ground. '
        '"I '
        'am afraid of {fear}," {he} said at last.',
        'One day, {he} met {intro2}. "Everyone is afraid of something," said {helper}. "What are '
        'you afraid of?" "I am afraid of {fear}," said {hero}.',
        'One evening, {intro2} found {him} crying {spot}. "I am so afraid of {fear}," said {hero}.',
    ),
    (
        '{helper} did not laugh. "I used to be afraid of {fear} too," {he2} said. "We can try it '
        'together."',
        '"I will tell you a trick," said {helper}. "Take one small step every day."',
        '"Being brave does not mean that you are not afraid," said {helper}. "It means that you '
        'try."',
    ),
    (
        "So they tried. On the first day, {hero} ran away. On the second day, {he} stayed a little "
        "longer.",
        "The first time, {his} knees were shaking and {he} went back home. But {helper} came again "
        "the next day.",
        "They started slowly. {helper} held {his} hand, and {name} counted to ten.",
    ),
    (
        "Then one day, a small {kind3} needed help, and only {hero} was near. {He} forgot to be "
        "afraid and ran to help.",
        'At last {he} closed {his} eyes, took a deep breath, and did it. "I did it!" {he} shouted.',
        'On the seventh day, {he} did it all alone. It was not so bad! "Look at me!" {he} called.',
    ),
    (
        '"I knew you could do it," said {helper}. {He2} was very proud of {him}.',
        '{helper} clapped. "How do you feel?" {he2} asked. "I feel as tall as a house," said '
        "{hero}.",
        "Everybody cheered, and {helper} cheered the loudest.",
    ),
    (
        "After that, {hero} was not afraid of {fear} any more.",
        "{Hero} gave {his} {thing} to a small {kind3} who was afraid, and told {him4} not to "
        "give up.",
        "{name} learned that [fear gets smaller when you share it|one small step is enough to "
        "begin].",
    ),
)

BROKEN: tuple[Beat, ...] = (
    (
        "{His} best friend was {intro2}. {helper} had a {thing} and was very proud of it.",
        "{He} often visited {intro2}. In the house of {helper} stood a beautiful {thing}.",
        'One day, {intro2} came with a {thing}. "Please take care of it for me," said {helper}.',
    ),
    (
        '"Do not touch it," {helper} said. But when {he2} went out, {hero} picked it up.',
        "{Hero} only wanted to look at it. {He} held it up to the light.",
        "When {he} was alone, {hero} began to play with it.",
    ),
    (
        "Then the {thing} slipped and fell on the floor. Crack! It was broken.",
        "Suddenly {he} tripped. The {thing} fell down and broke in two.",
        "But {he} was not careful. There was a loud crack, and the {thing} was broken.",
    ),
    (
        "{name} was scared. {He} hid the pieces {spot}.",
        '"Oh no," {he} whispered. Quickly, {he} put the pieces {spot}, where nobody would look.',
        "{His} heart beat fast. {He} hid the broken {object} {spot} and ran home.",
    ),
    (
        '"Have you seen my {thing}?" asked {helper}. "No," said {hero}, and {his} face turned red.',
        "Soon {helper} was looking for the {thing} everywhere. {Hero} said nothing, but {he} felt "
        "terrible.",
        'The next day {helper} said, "My {thing} is gone. Maybe a thief took it." {Hero} could not '
        "look at {him2}.",
    ),
    (
        'That night {he} could not sleep. {He} asked {his} {rel} what to do. "Tell the truth," '
        "{he3} said.",
        "{He} could not eat and {he} could not sleep. In the morning {he} knew what {he} had to "
        "do.",
        '"A lie is heavy to carry," {his} {rel} told {him}.',
    ),
    (
        '{Hero} went to {helper}. "I broke your {thing} and hid it {spot}," {he} said. "I am so '
        'sorry."',
        'So {he} took the pieces from the place {spot} and went to {helper}. "It was me," {he} '
        'said. "I am sorry."',
    ),
    (
        '{helper} was quiet for a moment. "I am sad about it," {he2} said, "but I am glad that you '
        'told me."',
        'At first {helper} was angry. Then {he2} smiled. "Thank you for telling the truth," {he2} '
        "said.",
    ),
    (
        "Together they glued the pieces, and the {thing} was almost as good as new.",
        "They mended the {thing} together. You could still see the crack, but {helper} did not "
        "mind.",
        "{Hero} worked for many days to mend the {thing}, and then {he} gave it back.",
    ),
    (
        "{name} learned that [the truth is always best|a good friend forgives].",
        "From that day on, {hero} always told the truth.",
        "And {hero} felt as light as a feather.",
    ),
)

NEW_FRIEND: tuple[Beat, ...] = (
    (
        "{Hero} was new there and did not know anyone. {He} felt lonely.",
        "{He} had nobody to play with, and the days were long.",
        "{He} had just moved there with {his} {rel}. Everything was strange.",
    ),
    (
        "All {he} had was a {thing}. Every day {he} played with it alone {spot}.",
        "{He} sat {spot} with {his} {thing} and watched the others play.",
        "{His} only friend was a {thing}. {He} talked to it every night.",
    ),
    (
        '"I wish I had a friend," {he} said one [day|evening].',
        "One day, {he} wanted to say hello to the others, but {he} was too shy.",
        '"Go out and say hello," said {his} {rel}. But {hero} was afraid that they would laugh.',
    ),
    (
        "Then one day, {he} saw {intro2}, who was sitting all alone too.",
        "One morning, {intro2} came to the place where {hero} was sitting.",
        "The next day, {he} noticed {intro2} looking at {him} from behind a tree.",
    ),
    (
        '{name} took a deep breath. "Hello," {he} said. "Do you want to play with my {thing}?"',
        '"What a nice {object}!" said {helper}. "May I see it?" {Hero} held it out.',
        '"Is that your {thing}?" asked {helper} in a quiet voice. "Yes," said {hero}. "You can '
        'try it."',
    ),
    (
        "They played all afternoon. They laughed so much that their bellies hurt.",
        '"I was too shy to talk to you," said {helper}. "Me too!" said {hero}, and they both '
        "laughed.",
        "It turned out that they liked the same games, the same songs and even the same {food}.",
    ),
    (
        "?",
        "When the sun went down, they did not want to go home.",
        '"Will you come back tomorrow?" asked {hero}. "Of course," said {helper}.',
        "They shared a {food} and made plans for the next day.",
    ),
    (
        "From that day on, {name} was never lonely again.",
        "{Hero} learned that [one brave hello can make a friend|a friend may be waiting for you to "
        "speak first].",
        "Now {he} had a {thing} and a friend, and {he} was the happiest {kind} {where}.",
        "{name} and {name2} have been best friends ever since.",
    ),
)

STUCK: tuple[Beat, ...] = (
    (
        "One windy day, {hero} went outside to play with {his} {thing}.",
        "One day, {his} {rel} gave {him} a {thing}. {name} ran outside to try it.",
        "One morning, {he} threw {his} {thing} high up into the air, just for fun.",
    ),
    (
        "But a strong wind took the {thing} and carried it into the top of a tall tree.",
        "A cheeky crow picked up the {thing} and dropped it on a high branch.",
        "It flew up and up and got stuck on a high branch. It did not come down again.",
    ),
    (
        "{Hero} jumped as high as {he} could, but the branch was too high.",
        "{He} threw a stick at it, but the stick got stuck too.",
        "{He} tried to climb the tree, but {he} slid down again and again.",
    ),
    (
        'Then {intro2} came by. "Let me try," said {helper}. But {he2} could not reach it alone '
        "either.",
        '{intro2} heard the noise. "May I help?" asked {helper}. {He2} shook the tree, but nothing '
        "happened.",
    ),
    (
        '"I have an idea," said {hero}. "If I stand on your back, we will be tall enough."',
        '"We are not tall enough alone," said {helper}, "but maybe we are tall enough together."',
        'They sat down and thought. "I know!" said {hero}. "You can lift me up."',
    ),
    (
        "So {hero} climbed on the back of {helper}. {He} stretched and stretched. At last {he} "
        "got the {thing}!",
        "{helper} stood very still, and {hero} climbed on top. One more try, and the {thing} was "
        "free.",
        "They wobbled to the left. They wobbled to the right. Then {hero} caught the {thing} and "
        "they both fell down into the soft grass, laughing.",
    ),
    (
        '"We did it!" they shouted.',
        '"Thank you, {name2}," said {hero}. "I could not have done it without you."',
        '"What a team we are!" said {helper}.',
    ),
    (
        "They played with the {thing} until it was dark.",
        "{name} learned that two friends together can do what one alone cannot.",
        "From then on, whenever something was hard, {hero} asked for help.",
        "To celebrate, they ate a {food}.",
    ),
)

GRUMPY: tuple[Beat, ...] = (
    (
        "Every day {hero} had to cross a small bridge. One day, {intro2} stood on it.",
        "{Where} there was a bridge, and on the bridge lived {intro2}.",
        "Near {his} house lived {intro2}. Everybody said that {helper} was very grumpy.",
    ),
    (
        '"Go away!" shouted {helper}. "This is my place!"',
        '"What do you want?" growled {helper}. "Leave me alone!"',
    ),
    (
        "{name} was frightened and ran home. But {he} kept thinking about {helper}.",
        "The others threw stones and ran away. But {hero} did not.",
        '{Hero} took a step back. "Why are you so angry?" {he} asked. {helper} did not answer.',
    ),
    (
        '"Maybe {he2} is only sad," said {his} {rel}. "Try to be kind."',
        '"{name2} has no friends," said {his} {rel}. "That makes {him2} grumpy."',
    ),
    (
        "The next day, {hero} brought a {food} and put it down in front of {helper}.",
        'So the next day {he} went back with a {thing}. "This is for you," {he} said.',
    ),
    (
        '{helper} looked surprised. "For me?" {he2} asked. "Nobody has ever given me anything."',
        "{helper} did not know what to say. A tear rolled down {his2} cheek.",
    ),
    (
        '"I lost my {thing2} long ago," said {helper}, "and I have been sad ever since." "I will '
        'help you find it," said {hero}.',
        '"I am sorry that I shouted," said {helper}. "I was lonely." "Then come and play with us," '
        "said {hero}.",
    ),
    (
        "They looked together, and then they played together. {helper} laughed for the first time "
        "in years.",
        "So {helper} came along. {He2} turned out to be very good at games and even better at "
        "telling stories.",
    ),
    (
        "{name} learned that a kind word can change a grumpy heart.",
        "After that, nobody was afraid of {helper} any more.",
        "And {helper} was never grumpy again, except on Monday mornings.",
    ),
)
