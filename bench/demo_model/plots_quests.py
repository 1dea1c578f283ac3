"""Plots about finding, making and escaping; plots.py has the language of the templates."""

from __future__ import annotations

from lexicon import Beat

LOST: tuple[Beat, ...] = (
    (
        "{name} had a {thing} that {he} loved very much. {He} took it everywhere.",
        "{His} favourite thing in the world was a {thing}. It was a present from {his} {rel}.",
        "{His} {rel} had given {him} a {thing}, and {hero} played with it every day.",
        "More than anything, {hero} loved {his} {thing}.",
    ),
    (
        "One [morning|day|afternoon], the {thing} was gone. {Hero} felt very sad.",
        'But one [morning|day], {hero} could not find it. "Oh no! Where is my {thing}?" {he} '
        "cried.",
        "One day, {he} looked for the {thing}, but it was not there. {name} began to cry.",
        'Then one [windy|rainy|busy] day, {he} lost the {thing}. "I must find it," said {hero}.',
    ),
    (
        "{He} looked under the bed and behind the door, but the {thing} was not there.",
        "{He} searched the whole house. {He} looked in every box and every corner, but found "
        "nothing.",
        "{name} asked everyone {where}, but nobody had seen the {thing}.",
        "First {he} looked in the kitchen. Then {he} looked outside. It was no use.",
    ),
    (
        '[Soon|Then|Just then] {he} met {intro2}. "Why are you so sad?" asked {helper}. "I lost my '
        '{thing}," said {hero}.',
        '{intro2} saw {him} and stopped. "What is wrong?" {he2} asked. "My {thing} is gone," '
        "{hero} answered.",
        '{name} sat down and sighed. {intro2} came by. "Do not cry," said {helper}. "I will help '
        'you look for your {thing}."',
    ),
    (
        '"Where did you play yesterday?" asked {helper}. {name} thought hard. "I was {spot}," '
        "{he} said.",
        '"Let us think," said {helper}. "Where did you last have it?" {Hero} remembered sitting '
        "{spot}.",
        '"I think I saw something {spot}," said {helper}. "Come with me!"',
    ),
    (
        "They ran there together, and {spot} they found the {thing}. {name} jumped for joy.",
        "Together they went to look. And there it was! The {thing} was lying {spot}.",
        "So the two of them hurried off. {helper} looked {spot} and [pulled out|held up] the "
        "{thing}.",
    ),
    (
        '"Thank you, {name2}!" said {hero}. {He} gave {helper} a big hug.',
        '{Hero} was so happy. "You are a true friend," {he} told {helper}.',
        '"You found it! Thank you!" {hero} shouted. {helper} only smiled.',
    ),
    (
        "From that day on, {hero} always put the {thing} away in a safe place.",
        "{name} learned that [a friend can help you find what you lost|looking is easier with "
        "two].",
        "After that, the two friends played with the {thing} together every day.",
        "{Hero} never forgot how {helper} had helped {him}.",
    ),
)

STORM: tuple[Beat, ...] = (
    (
        "One [day|afternoon], {hero} went out to play with {his} {thing}.",
        "One [day|afternoon], {hero} was playing {spot} with {his} {thing}.",
        "{name} wanted to show {his} {thing} to {his} {rel}, so {he} set out early in the morning.",
    ),
    (
        "Suddenly the sky grew dark. The wind blew hard and rain began to fall.",
        "All at once, black clouds covered the sun. Thunder rolled, and it began to rain.",
        "Then the snow began to fall, faster and faster. Soon {he} could not see the path.",
    ),
    (
        '{Hero} was afraid. "What shall I do?" {he} said. {He} held the {thing} tight.',
        "{name} ran as fast as {he} could, but the storm was faster. {He} was cold and wet.",
        '"I want to go home," {hero} cried, but the wind was louder than {his} voice.',
    ),
    (
        "?",
        "{He} tried to hide {spot}, but it was no use.",
        "{He} tried to make a roof out of leaves, but the wind blew it away.",
        "{He} tried to walk home, but the wind pushed {him} back.",
    ),
    (
        'Then {he} heard a voice. "Come in here, quick!" It was {intro2}, standing at the door of '
        "a small house.",
        'Just then, {intro2} saw {him} from the window. "Come inside!" {he2} called. "You will be '
        'safe with me."',
        'A light was shining not far away. {intro2} opened the door. "You poor thing," {he2} said. '
        '"Come in and get warm."',
    ),
    (
        "Inside, a fire was burning. {helper} gave {him} a {food} and a dry blanket.",
        "The house was small but warm. They shared a {food} and listened to the rain.",
        "{name} sat by the fire. {helper} told {him} that storms are loud but never stay for long.",
    ),
    (
        "?",
        '"Are you not afraid?" asked {hero}. "Not when I have company," said {helper}.',
        "{Hero} let {helper} hold the {thing}, and soon they were both laughing.",
        "They sang songs so loud that they could not hear the wind.",
    ),
    (
        "In the morning, the storm was over. A rainbow stood above the {place}.",
        "At last the wind stopped and the sun came out again. Everything {where} was fresh and "
        "clean.",
        "When they woke up, the sky was blue. {helper} walked home with {him}.",
    ),
    (
        "{name} was not afraid of storms any more.",
        '"Thank you for opening your door," said {hero}. "Come back any time," said {helper}.',
        "From that day on, {hero} and {helper} were the best of friends.",
        "{Hero} gave {helper} the {thing} to say thank you.",
    ),
)

WAY_HOME: tuple[Beat, ...] = (
    (
        "One day, {hero} saw a [butterfly|blue bird|shining beetle] and followed it.",
        '{His} {rel} always said, "Do not go too far." But one day {hero} forgot.',
        "One day, {he} went out to look for [berries|mushrooms|nuts|flowers]. {He} walked and "
        "walked.",
    ),
    (
        "{He} went farther and farther. When {he} looked around, {he} did not know where {he} was.",
        "Soon {he} came to a part of the {place} that {he} had never seen before. {He} was lost.",
        'When {he} stopped, nothing looked the same. "Where is my home?" {he} asked.',
    ),
    (
        "{He} tried one path, but it led back to the same spot. {He} tried another, and it was "
        "even worse.",
        '{He} called out, "Hello! Is anybody there?" But nobody answered.',
        "The sun was going down, and {hero} was getting cold and scared.",
    ),
    (
        'Then {he} saw {intro2}. "Are you lost?" asked {helper}. "Yes," said {hero} in a small '
        "voice.",
        'At last {intro2} heard {him}. "Do not be afraid," said {helper}. "I know every path '
        '{where}."',
        '{intro2} was sitting {spot}. "You look lost," {he2} said. "Tell me about your home."',
    ),
    (
        '"My home is near a big tree, and there is a {thing} by the door," said {hero}.',
        '"I remember that there is a {thing} in our window," {he} said.',
        '"We have a {thing} hanging over the door," said {hero}. "You can see it from far away."',
    ),
    (
        '"I know that {object}!" said {helper}. "Follow me." {He2} took {hero} by the hand.',
        '{helper} nodded. "Then I know the way. Stay close to me."',
        '"A {thing}? I have seen it," said {helper}, and they started to walk.',
    ),
    (
        "They crossed a stream and climbed a hill. At last {hero} saw the {thing}. {He} was home!",
        "They walked under the [moon|stars] for a long time. Then {name} saw the {thing} and began "
        "to run.",
        'Step by step, they came closer. "Look, there is the {thing}!" shouted {hero}.',
    ),
    (
        '{His} {rel} came out and hugged {him}. "I was so worried," {he3} said.',
        "{His} {rel} was waiting at the door. {He3} thanked {helper} and gave {him2} a {food}.",
        "{His} {rel} was so happy that {he3} cried. They all ate a {food} together.",
    ),
    (
        "{Hero} promised never to go so far alone again.",
        "{name} learned to look around and remember the way.",
        "After that, {hero} only went exploring with {helper}.",
    ),
)

GIFT: tuple[Beat, ...] = (
    (
        "Tomorrow was the birthday of {his} {rel}, and {hero} wanted to give {him3} a {thing}.",
        "{His} {rel} had a birthday soon. {He3} had always wanted a {thing}.",
        'One day, {hero} wanted to surprise {his} {rel}. "I will give {him3} a {thing}," {he} '
        "thought.",
    ),
    (
        "{He} went to the shop, but the {thing} cost ten coins. {name} had only two.",
        "But {he} had no money at all. {He} looked in all {his} pockets and found only a string.",
        "{He} saw a beautiful {thing} in the shop, but it cost far too much.",
    ),
    (
        "{Hero} sat down {spot} and did not know what to do.",
        '"What can I do now?" {he} said sadly, and {he} walked away.',
        "{He} tried to sell some flowers, but nobody wanted to buy them.",
    ),
    (
        'Then {intro2} came by. "Why do you not make it yourself?" asked {helper}. "I can show you '
        'how."',
        '{intro2} saw {him} and asked what was wrong. "I know how to make a {thing}," said '
        '{helper}. "I will teach you."',
        'There {he} met {intro2}. "I need help in my workshop," said {helper}. "If you help me, we '
        'can make a {thing} together."',
    ),
    (
        "They worked all day long. They cut and glued and painted.",
        "The first one broke, and the second one was crooked. But {hero} did not give up.",
        "It was hard work. {name} made many mistakes, but {helper} was patient.",
    ),
    (
        "In the evening, the {thing} was ready. It was a little crooked, but it was beautiful.",
        "At last the {thing} was done. {name} wrapped it in paper and tied it with a string.",
        'When the stars came out, they were finished. "It is better than the one in the shop," '
        "said {helper}.",
    ),
    (
        'The next day, {his} {rel} opened the present. "A {thing}! Did you make it yourself?" '
        "{he3} "
        "asked. {Hero} nodded.",
        "{His} {rel} was so happy that {he3} danced around the room with the {thing}.",
        '"This is the best present I have ever had," said {his} {rel}, and {he3} hugged {him}.',
    ),
    (
        "{name} learned that a gift made with love is the best gift.",
        "They invited {helper} too, and everyone ate a {food}.",
        "And {his} {rel} kept the {thing} for ever.",
        "Since that day, {hero} makes all {his} presents by hand.",
    ),
)

SEED: tuple[Beat, ...] = (
    (
        "One day, {hero} found a tiny seed {spot}.",
        'One spring morning, {intro2} gave {him} a seed. "Plant it and wait," said {helper}.',
        "{His} {rel} gave {him} a {seed} seed. {Hero} had never planted anything before.",
    ),
    (
        "{He} put it in the ground and gave it water from {his} [cup|little can].",
        "{He} dug a small hole, put the seed in, and covered it with earth. {He} put {his} {thing} "
        "next to it to mark the place.",
    ),
    (
        'The next day {he} looked. Nothing! {He} looked again and again. "Why does it not grow?" '
        "{he} asked.",
        "{He} waited one day, two days, three days. But there was only brown earth.",
        '{He} sat beside it the whole day. "Grow!" {he} shouted. But the seed did not grow.',
    ),
    (
        "{Hero} was angry. {He} wanted to dig it up and throw it away.",
        '"It is a bad seed," {he} said. "I do not want it any more."',
        "{He} even sang to it and told it stories, but nothing happened.",
    ),
    (
        '"Stop!" said {intro2}. "A seed needs water, sun and time. Wait a little longer."',
        '{intro2} laughed softly. "Good things grow slowly," {he2} said. "Come, I will wait '
        'with you."',
    ),
    (
        "So {hero} watered the seed every morning and pulled out the weeds every evening.",
        "They gave it water each day. When it was hot, they gave it shade.",
        "Rain came, and sun came, and more rain. {name} was patient and took care of it.",
    ),
    (
        "Then one morning, there was a small green leaf! It grew and grew.",
        "And one day, a tiny green shoot looked out of the ground. {Hero} danced with joy.",
    ),
    (
        "By summer, it was a beautiful {seed}, the finest {where}.",
        "Some time later, it had become a big {seed}. Everybody came to look at it.",
    ),
    (
        "{name} learned that good things take time.",
        '"It was worth the wait," said {hero}.',
        "{Hero} shared its seeds with {name2}, and the next year there were many more.",
    ),
)

WISH: tuple[Beat, ...] = (
    (
        "One night, {hero} found a {thing} {spot}. It was glowing.",
        "One evening, {he} found a {thing} {spot}. When {he} touched it, it began to shine.",
        "One day, {he} saw something shining {spot}. It was a {thing}.",
    ),
    (
        '"I am a magic {object}," it said. "You may make three wishes."',
        'A soft voice came out of it. "You have found me, so you may have three wishes," it said.',
        'Then the {object} spoke! "I can give you three wishes," it said.',
    ),
    (
        "{Hero} wished for a mountain of [sweets|cakes|cookies]. Soon there was so much that "
        "{he} could not get "
        "out of the house.",
        "First {hero} wished to be as big as a tree. But then {he} did not fit into {his} bed.",
        "First {he} wished for a golden house. It was beautiful, but it was cold and empty.",
        "First {he} wished to fly. {He} flew up to the clouds, but it was windy and lonely there.",
    ),
    (
        'So {he} had to use the second wish. "Make everything as it was before," {he} said. And so '
        "it was.",
        '"I do not like this," said {hero}. "I wish that it was over!" And it was over at once.',
    ),
    (
        "Only one wish was left. {name} thought about it all day.",
        'Now {he} had only one more wish. "This time I must be wise," thought {hero}.',
    ),
    (
        "Then {he} met {intro2}, who was ill and could not walk.",
        "On the way {he} saw {intro2}, whose house had burned down in the night.",
        "Then {he} heard someone crying. It was {intro2}, who had lost {his2} way and missed "
        "{his2} family.",
    ),
    (
        '{Hero} did not think long. "I wish that {name2} will be well and happy," {he} said.',
        '"My last wish is for {name2}," said {hero}. "Please give {him2} what {he2} needs."',
    ),
    (
        "There was a flash of light. {helper} jumped up and laughed, and the {thing} was just a "
        "plain {object} again.",
        'The {object} shone one last time. "That was the best wish of all," it said, and then it '
        "was silent.",
    ),
    (
        "{name} had no more wishes, but {he} had a new friend.",
        "{Hero} learned that the best wishes are those for others.",
        "{helper} and {hero} became friends, and that was better than magic.",
    ),
)

RESCUE: tuple[Beat, ...] = (
    (
        'One day, {hero} was walking home when {he} heard a cry. "Help! Help!"',
        "One evening, a small voice called for help. {name} stopped and listened.",
        "One day, {he} was picking [berries|mushrooms|nuts|flowers] when someone shouted, "
        '"Please help me!"',
    ),
    (
        "{He} followed the voice and found a deep hole {spot}. At the bottom sat {intro2}.",
        "{He} ran to see. There, {spot}, {intro2} had fallen into a deep hole.",
        "It came from a deep pit {spot}. In the pit sat {intro2}.",
    ),
    (
        '"I have been here all night," said {helper}. "I am cold, and I cannot get out."',
        '"Please do not leave me," said {helper}. "I will not leave you," said {hero}.',
        '"How did you get there?" asked {hero}. "I was not looking where I was going," said '
        "{helper}.",
    ),
    (
        "{Hero} pulled as hard as {he} could, but {he} was not strong enough.",
        "First {he} used a branch, but the branch broke.",
        "{He} called for help, but nobody was near.",
    ),
    (
        "{He} sat down for a moment and looked around. Then {he} had an idea.",
        '"Think, {name}, think," {he} said to {himself}. Then {he} had an idea.',
    ),
    (
        "{He} tied a long rope to a tree and threw down the other end. {helper} held on, and "
        "{hero} "
        "pulled and pulled.",
        "{He} ran to fetch {his} {rel}. {He3} brought a rope, and together they pulled.",
        "{He} made a ladder from branches and vines. {He} worked until {his} hands were sore.",
    ),
    (
        "At last {helper} was free! {He2} hugged {hero} and cried for joy.",
        'Little by little, {helper} came out. "You saved me!" {he2} said.',
    ),
    (
        "To say thank you, {helper} gave {him} a [{food}. They ate it together.|{thing}. {Hero} "
        "has it still.]",
        '"If you ever need help, call me," said {helper}. And {he2} kept {his2} word.',
        "A month later, when {hero} was in trouble, it was {helper} who came to help {him}.",
    ),
    (
        "{name} learned that [even a small {kind} can do a great thing|nobody is too small to "
        "help].",
        "Everyone {where} talked about the brave {kind}.",
        "That was how {name} and {name2} became friends.",
    ),
)

TREASURE: tuple[Beat, ...] = (
    (
        "One day, {hero} found an old map inside a {thing}.",
        "One rainy day, {he} opened a {thing} and found a map inside.",
        "One day, {his} {rel} gave {him} a {thing}. Inside it was a map with a red cross.",
    ),
    (
        '"A treasure map!" {he} said. {He} ran to {his} friend, {intro2}.',
        '{He} showed it to {intro2}. "That is a treasure map," said {helper}. "Let us go!"',
    ),
    (
        "The map showed a path that ended {spot}. They packed a {food} and set out.",
        'The red cross was {spot}. "It is far," said {helper}, "but we can do it."',
    ),
    (
        "They crossed a river and climbed a steep hill. Once they took the wrong path and had to "
        "go back.",
        'On the way a big {kind3} stood in the path. "Nobody may pass without a riddle," '
        "{he4} said. {Hero} knew the answer, and they could go on.",
        "Soon it was dark, and {hero} wanted to go home. But {helper} told {him} a funny story, "
        "and they walked on.",
    ),
    (
        "At last they came to the place. They dug {spot} until they hit something hard.",
        "Finally they were there. {Hero} dug and dug {spot}, and {helper} helped.",
    ),
    (
        'It was a box! Inside there was no gold. There was only a note. It said, "The real '
        'treasure is the friend who came with you."',
        "It was a small chest full of [old coins|shining stones|seeds]. They shared it equally.",
        'There was a jar of [honey|sweets|buttons] and a letter. The letter said, "Share this '
        'with everyone."',
    ),
    (
        "{name} looked at {helper}, and they both began to laugh.",
        '"What shall we do with it?" asked {helper}. "We will share it with everyone," said '
        "{hero}.",
    ),
    (
        "They hid the map inside the {thing} again, so that someone else could find it.",
        "{name} never forgot that day. It was the best adventure of {his} life.",
        "And {hero} knew that [the way there was the best part|a friend is worth more than gold].",
    ),
)
