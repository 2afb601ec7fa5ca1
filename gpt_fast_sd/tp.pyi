from tp import *
